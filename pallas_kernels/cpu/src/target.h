// The processors that kernels are compiled for, and the one that they run for.
//
// A kernel source is compiled once for each of JAXKV_COMPILED, inside the namespace of its name, and offers a table of functions there.
// What chooses among them is compiled for the baseline.
#pragma once

#include <cstdint>
#include <string>

namespace jaxkv {

// In rising order; each has all that those before it have.
enum class Target : int32_t { baseline, avx2, avx512, avx512bf16, amx };
constexpr int32_t TARGETS = 5;

const char* name_of(Target target);

// Whether this library is compiled for the target and this processor has it.
bool has(Target target);

// The one that runs where none is named: what set_target has said, or the fastest there is.
Target current_target();

// Names the target that runs from now on. False, and nothing changes, where there is none of this name here.
bool set_target(const std::string& name);

// Names of all targets that `has` is true for, in rising order, with blanks between them.
std::string targets_here();

// A target's number as handlers get it: -1 is the current one. False where it is not there.
bool resolve_target(int32_t number, Target* target);

}  // namespace jaxkv

// JAXKV_AVX2(x) is x where the library is compiled for that target, else nothing; so are the others.
#if defined(JAXKV_WITH_AVX2)
#define JAXKV_AVX2(...) __VA_ARGS__
#else
#define JAXKV_AVX2(...)
#endif
#if defined(JAXKV_WITH_AVX512)
#define JAXKV_AVX512(...) __VA_ARGS__
#else
#define JAXKV_AVX512(...)
#endif
#if defined(JAXKV_WITH_AVX512BF16)
#define JAXKV_AVX512BF16(...) __VA_ARGS__
#else
#define JAXKV_AVX512BF16(...)
#endif

// Declares `const Table& get()` in the namespace of each compiled target, and `const Table& get(Target)`, which takes the highest at or
// below the target. Stands in namespace jaxkv. What is compiled for AVX-512 BF16, too, takes the second form.
#define JAXKV_TABLE(Table, get) JAXKV_TABLE_OF(Table, get, )
#define JAXKV_TABLE_WITH_BF16(Table, get)                              \
  JAXKV_AVX512BF16(namespace avx512bf16 { const Table& get(); })       \
  JAXKV_TABLE_OF(Table, get, JAXKV_AVX512BF16(if (target >= Target::avx512bf16) return avx512bf16::get();))
#define JAXKV_TABLE_OF(Table, get, higher)                             \
  namespace baseline { const Table& get(); }                           \
  JAXKV_AVX2(namespace avx2 { const Table& get(); })                   \
  JAXKV_AVX512(namespace avx512 { const Table& get(); })               \
  static inline const Table& get(Target target) {                      \
    higher                                                             \
    JAXKV_AVX512(if (target >= Target::avx512) return avx512::get();)  \
    JAXKV_AVX2(if (target >= Target::avx2) return avx2::get();)        \
    (void)target;                                                      \
    return baseline::get();                                            \
  }
