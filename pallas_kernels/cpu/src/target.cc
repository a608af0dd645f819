#include "target.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jaxkv {
namespace {

constexpr const char* NAMES[TARGETS] = {"baseline", "avx2", "avx512", "avx512bf16", "amx"};

#if defined(__x86_64__)
bool f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

[[maybe_unused]] bool cpuid7(unsigned subleaf, unsigned bit_of_eax, unsigned mask_of_edx) {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, subleaf, &a, &b, &c, &d)) return false;
  return (bit_of_eax == 32 || (a >> bit_of_eax & 1)) && (d & mask_of_edx) == mask_of_edx;
}

// Linux keeps the tiles' registers from a process until it asks for them.
[[maybe_unused]] bool may_use_tiles() {
#if defined(__linux__)
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
  return false;
#endif
}
#endif

bool find(Target target) {
  switch (target) {
    case Target::baseline:
      return true;
#if defined(JAXKV_WITH_AVX2)
    case Target::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c();
#endif
#if defined(JAXKV_WITH_AVX512)
    case Target::avx512:
      return has(Target::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
#if defined(JAXKV_WITH_AVX512BF16)
    case Target::avx512bf16:
      return has(Target::avx512) && cpuid7(1, 5, 0);
#endif
#if defined(JAXKV_WITH_AMX)
    case Target::amx:
      return has(Target::avx512bf16) && cpuid7(0, 32, 1u << 22 | 1u << 24) && may_use_tiles();
#endif
    default:
      return false;
  }
}

// Intel's cores take two cycles for the product of pairs, and lose to widening (docs/measurements.md, "Native products"). AMD states one
// cycle, and half of that rate for what it replaces; not measured.
bool pairs_are_fast() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

Target best_here() {
  for (int32_t i = TARGETS - 1; i > 0; --i)
    if (has(Target(i)) && (Target(i) != Target::avx512bf16 || pairs_are_fast())) return Target(i);
  return Target::baseline;
}

std::atomic<int32_t> named{-1};

}  // namespace

const char* name_of(Target target) { return NAMES[int32_t(target)]; }

bool has(Target target) {
  static std::atomic<int32_t> known[TARGETS];  // 0: not asked yet, 1: no, 2: yes
  std::atomic<int32_t>& slot = known[int32_t(target)];
  if (slot.load() == 0) slot.store(find(target) ? 2 : 1);
  return slot.load() == 2;
}

Target current_target() {
  const int32_t number = named.load();
  if (number >= 0) return Target(number);
  static const Target best = best_here();
  return best;
}

bool set_target(const std::string& name) {
  for (int32_t i = 0; i < TARGETS; ++i) {
    if (name == NAMES[i] && has(Target(i))) {
      named.store(i);
      return true;
    }
  }
  return false;
}

std::string targets_here() {
  std::string out;
  for (int32_t i = 0; i < TARGETS; ++i)
    if (has(Target(i))) out += (out.empty() ? "" : " ") + std::string(NAMES[i]);
  return out;
}

bool resolve_target(int32_t number, Target* target) {
  if (number == -1) {
    *target = current_target();
    return true;
  }
  if (number < 0 || number >= TARGETS || !has(Target(number))) return false;
  *target = Target(number);
  return true;
}

}  // namespace jaxkv
