// Rotary rotation: dimension i with dimension i + half, products and sums each rounded on their own.
#include "rotation.h"

#include "simd.h"

namespace jaxkv {
namespace JAXKV_TARGET {
namespace {

template <typename T>
JAXKV_INLINE F load_some(const T* from, int64_t n) { return n >= LANES ? load(from) : load_tail(from, n); }
template <typename T>
JAXKV_INLINE void store_some(T* to, int64_t n, F x) { n >= LANES ? store(to, x) : store_tail(to, n, x); }

template <typename T>
JAXKV_INLINE void rotate(const Rotation& call, const T* x, const float* cos, const float* sin, T* out) {
  const int64_t half = call.half;
  for (int64_t i = 0; i < half; i += LANES) {
    const int64_t n = half - i;
    const F low = load_some(x + i, n), high = load_some(x + half + i, n), c = load_some(cos + i, n), s = load_some(sin + i, n);
    store_some(out + i, n, low * c - high * s);
    store_some(out + half + i, n, high * c + low * s);
  }
  __builtin_memcpy(out + 2 * half, x + 2 * half, size_t(call.head_dim - 2 * half) * sizeof(T));
}

template <typename T>
void all_tokens(const Rotation& call, int64_t begin, int64_t end) {
  const int64_t D = call.head_dim;
  for (int64_t token = begin; token < end; ++token) {
    const float *const cos = call.cos + token * call.half, *const sin = call.sin + token * call.half;
    for (int64_t head = 0; head < call.kv_heads; ++head) {
      const T* x = static_cast<const T*>(call.x) + (token * call.kv_heads + head) * (call.q_per_kv + 2) * D;
      T* const q = static_cast<T*>(call.q) + (token * call.kv_heads + head) * call.q_per_kv * D;
      for (int64_t i = 0; i < call.q_per_kv; ++i, x += D) rotate(call, x, cos, sin, q + i * D);
      rotate(call, x, cos, sin, static_cast<T*>(call.k) + (token * call.kv_heads + head) * D);
      __builtin_memcpy(static_cast<T*>(call.v) + (token * call.kv_heads + head) * D, x + D, size_t(D) * sizeof(T));
    }
  }
}

void tokens(const Rotation& call, int64_t begin, int64_t end) {
  switch (call.dtype) {
    case Dtype::float32: return all_tokens<float>(call, begin, end);
    case Dtype::bfloat16: return all_tokens<bf16>(call, begin, end);
    default: return all_tokens<f16>(call, begin, end);
  }
}

}  // namespace

const RotationKernels& rotation_kernels() {
  static constexpr RotationKernels kernels{tokens};
  return kernels;
}

}  // namespace JAXKV_TARGET
}  // namespace jaxkv
