// A square of LANES vectors, turned over in registers.
#pragma once

#include "simd.h"

namespace jaxkv {
namespace JAXKV_TARGET {
namespace {

// Pairs of the two vectors' elements within each four of them: of the lower two, of the upper two.
JAXKV_INLINE void interleave(F a, F b, F* low, F* high) {
#if defined(__AVX512F__)
  *low = (F)_mm512_unpacklo_ps((__m512)a, (__m512)b);
  *high = (F)_mm512_unpackhi_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  *low = (F)_mm256_unpacklo_ps((__m256)a, (__m256)b);
  *high = (F)_mm256_unpackhi_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
  *low = (F)_mm_unpacklo_ps((__m128)a, (__m128)b);
  *high = (F)_mm_unpackhi_ps((__m128)a, (__m128)b);
#else
  *low = (F)vzip1q_f32((float32x4_t)a, (float32x4_t)b);
  *high = (F)vzip2q_f32((float32x4_t)a, (float32x4_t)b);
#endif
}

// The same with two elements as one.
JAXKV_INLINE void interleave_pairs(F a, F b, F* low, F* high) {
#if defined(__AVX512F__)
  *low = (F)_mm512_unpacklo_pd((__m512d)a, (__m512d)b);
  *high = (F)_mm512_unpackhi_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
  *low = (F)_mm256_unpacklo_pd((__m256d)a, (__m256d)b);
  *high = (F)_mm256_unpackhi_pd((__m256d)a, (__m256d)b);
#elif defined(__x86_64__)
  *low = (F)_mm_movelh_ps((__m128)a, (__m128)b);
  *high = (F)_mm_movehl_ps((__m128)b, (__m128)a);
#else
  *low = (F)vzip1q_f64((float64x2_t)a, (float64x2_t)b);
  *high = (F)vzip2q_f64((float64x2_t)a, (float64x2_t)b);
#endif
}

// x[i][j] becomes x[j][i].
JAXKV_INLINE void transpose(F (&x)[LANES]) {
  F y[LANES];  // y[4 * g + c]: in its fours L, column 4 * L + c of the rows 4 * g to 4 * g + 3
  for (int g = 0; g < LANES; g += 4) {
    F a, b, c, d;
    interleave(x[g], x[g + 1], &a, &b);
    interleave(x[g + 2], x[g + 3], &c, &d);
    interleave_pairs(a, c, &y[g], &y[g + 1]);
    interleave_pairs(b, d, &y[g + 2], &y[g + 3]);
  }
  for (int c = 0; c < 4; ++c) {
#if defined(__AVX512F__)
    const __m512 p = (__m512)y[c], q = (__m512)y[4 + c], r = (__m512)y[8 + c], s = (__m512)y[12 + c];
    const __m512 pq_even = _mm512_shuffle_f32x4(p, q, 0x88), rs_even = _mm512_shuffle_f32x4(r, s, 0x88);  // fours p0 p2 q0 q2
    const __m512 pq_odd = _mm512_shuffle_f32x4(p, q, 0xdd), rs_odd = _mm512_shuffle_f32x4(r, s, 0xdd);
    x[c] = (F)_mm512_shuffle_f32x4(pq_even, rs_even, 0x88);
    x[4 + c] = (F)_mm512_shuffle_f32x4(pq_odd, rs_odd, 0x88);
    x[8 + c] = (F)_mm512_shuffle_f32x4(pq_even, rs_even, 0xdd);
    x[12 + c] = (F)_mm512_shuffle_f32x4(pq_odd, rs_odd, 0xdd);
#elif defined(__AVX2__)
    x[c] = (F)_mm256_permute2f128_ps((__m256)y[c], (__m256)y[4 + c], 0x20);
    x[4 + c] = (F)_mm256_permute2f128_ps((__m256)y[c], (__m256)y[4 + c], 0x31);
#else
    x[c] = y[c];
#endif
  }
}

}  // namespace
}  // namespace JAXKV_TARGET
}  // namespace jaxkv
