// One vocabulary of vectors for all targets, so that a kernel is written once and compiled once per target with that target's flags.
//
//     F            LANES floats: 4 with SSE2 and NEON, 8 with AVX2, 16 with AVX-512
//     load, store  F from and to float, bf16, f16 (int8_t, f8e4m3fn, f8e5m2: load only); load_tail, store_tail touch n elements alone
//     fma          one rounding where the target has the instruction, two (product, then sum) in the baseline of x86
//     sum, sum4    lanes added in one fixed order; sum4 gives the bits of four times sum
//
// Everything here has internal linkage. A function shared between translation units would be one copy, and the linker would be free to
// keep the one that was compiled for AVX-512. For the same reason a kernel includes nothing of the C++ library but <cstdint>, <cstddef>.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef JAXKV_TARGET
#error "compile kernels with -DJAXKV_TARGET=<name of the target>, see CMakeLists.txt"
#endif

#define JAXKV_INLINE inline __attribute__((always_inline))
#define JAXKV_LAMBDA __attribute__((always_inline))

namespace jaxkv {
namespace JAXKV_TARGET {
namespace {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX2__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif
constexpr int LANES = VECTOR_BYTES / 4;

typedef float F __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t I __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t U __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t U16 __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef int8_t I8 __attribute__((vector_size(VECTOR_BYTES / 4)));
typedef uint8_t U8 __attribute__((vector_size(VECTOR_BYTES / 4)));
typedef float F4 __attribute__((vector_size(16)));

// f(0) .. f(N - 1), written out, with constants of type Index: so that arrays of vectors that f indexes become registers, which a loop
// that the compiler unrolls later does not give. The lambda is marked with JAXKV_LAMBDA.
template <int N>
struct Index {
  constexpr operator int() const { return N; }
};
template <int N, int I = 0, typename Function>
JAXKV_INLINE void unrolled(const Function& f) {
  if constexpr (I < N) {
    f(Index<I>{});
    unrolled<N, I + 1>(f);
  }
}

// Storage of the narrow types: their bits.
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
struct f8e4m3fn { uint8_t bits; };
struct f8e5m2 { uint8_t bits; };

// The unsigned integers of LANES elements of a size.
template <size_t Bytes> struct Bits;
template <> struct Bits<4> { typedef U type; };
template <> struct Bits<2> { typedef U16 type; };
template <> struct Bits<1> { typedef U8 type; };

JAXKV_INLINE F splat(float x) { return x - F{}; }  // x - 0 keeps -0, which x + 0 does not
JAXKV_INLINE U splat_bits(uint32_t x) { return x + U{}; }
JAXKV_INLINE U bits_of(F x) { return (U)x; }
JAXKV_INLINE F from_bits(U x) { return (F)x; }
// Per lane: where the mask (all ones or all zeros) is set a, else b.
JAXKV_INLINE U choose(U mask, U a, U b) { return (a & mask) | (b & ~mask); }
JAXKV_INLINE F choose(U mask, F a, F b) { return (F)choose(mask, (U)a, (U)b); }

JAXKV_INLINE F max(F a, F b) {  // b where a is NaN
#if defined(__AVX512F__)
  return (F)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (F)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
  return (F)_mm_max_ps((__m128)a, (__m128)b);
#else
  return choose((U)(a > b), a, b);
#endif
}

JAXKV_INLINE F fma(F a, F b, F c) {
#if defined(__AVX512F__)
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// ---- bits of LANES elements, or of the first n with zeros behind them

template <typename V>
JAXKV_INLINE V load_bits(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

template <typename V>
JAXKV_INLINE void store_bits(void* to, V v) { __builtin_memcpy(to, &v, sizeof v); }

template <typename T>
JAXKV_INLINE typename Bits<sizeof(T)>::type load_bits_tail(const T* from, int64_t n) {
  typedef typename Bits<sizeof(T)>::type V;
#if defined(__AVX512F__)
  const uint32_t mask = (1u << n) - 1;
  if constexpr (sizeof(T) == 4) return (V)_mm512_maskz_loadu_epi32((__mmask16)mask, from);
  else if constexpr (sizeof(T) == 2) return (V)_mm256_maskz_loadu_epi16((__mmask16)mask, from);
  else return (V)_mm_maskz_loadu_epi8((__mmask16)mask, from);
#else
  unsigned char buffer[sizeof(V)] = {};
  for (int64_t i = 0; i < n; ++i) __builtin_memcpy(buffer + i * sizeof(T), from + i, sizeof(T));
  return load_bits<V>(buffer);
#endif
}

template <typename T, typename V>
JAXKV_INLINE void store_bits_tail(T* to, int64_t n, V v) {
#if defined(__AVX512F__)
  const uint32_t mask = (1u << n) - 1;
  if constexpr (sizeof(T) == 4) _mm512_mask_storeu_epi32(to, (__mmask16)mask, (__m512i)v);
  else if constexpr (sizeof(T) == 2) _mm256_mask_storeu_epi16(to, (__mmask16)mask, (__m256i)v);
  else _mm_mask_storeu_epi8(to, (__mmask16)mask, (__m128i)v);
#else
  unsigned char buffer[sizeof(V)];
  store_bits(buffer, v);
  for (int64_t i = 0; i < n; ++i) __builtin_memcpy(to + i, buffer + i * sizeof(T), sizeof(T));
#endif
}

// ---- float from what is stored, exactly, and back, rounded to nearest, ties to even. Nothing here rests on denormal floats, which XLA's
// threads take for zero.

JAXKV_INLINE F widen(U bits, const float*) { return (F)bits; }
JAXKV_INLINE F widen(U16 bits, const bf16*) { return (F)(__builtin_convertvector(bits, U) << 16); }
JAXKV_INLINE F widen(U8 bits, const int8_t*) {
  return __builtin_convertvector(__builtin_convertvector((I8)bits, I), F);
}

JAXKV_INLINE F widen(U16 bits, const f16*) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__)
  return (F)_mm256_cvtph_ps((__m128i)bits);
#elif defined(__aarch64__)
  return (F)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)bits));
#else
  const U all = __builtin_convertvector(bits, U), sign = (all & 0x8000) << 16, rest = all & 0x7fff;
  const U denormal = bits_of(__builtin_convertvector((I)rest, F) * 0x1p-24f);
  const U normal = (rest << 13) + (112u << 23) + ((U)(rest >= 0x7c00) & (112u << 23));  // infinity and NaN keep all ones as exponent
  return from_bits(sign | choose((U)(rest < 0x0400), denormal, normal));
#endif
}

JAXKV_INLINE F widen(U8 bits, const f8e5m2*) {  // the upper byte of a float16
  return widen(__builtin_convertvector(bits, U16) << 8, (const f16*)nullptr);
}

JAXKV_INLINE F widen(U8 bits, const f8e4m3fn*) {
  const U all = __builtin_convertvector(bits, U), sign = (all & 0x80) << 24, rest = all & 0x7f;
  const U denormal = bits_of(__builtin_convertvector((I)rest, F) * 0x1p-9f);
  const U normal = (rest << 20) + (120u << 23);
  const U number = choose((U)(rest < 0x08), denormal, normal);
  return from_bits(sign | choose((U)(rest == 0x7f), splat_bits(0x7fc00000), number));
}

JAXKV_INLINE U narrow(F x, float*) { return (U)x; }

JAXKV_INLINE U16 narrow(F x, bf16*) {
  const U u = (U)x, nan = (U)((u & 0x7fffffff) > 0x7f800000);
  return __builtin_convertvector(choose(nan, (u >> 16) | 0x40, (u + 0x7fff + ((u >> 16) & 1)) >> 16), U16);
}

JAXKV_INLINE U16 narrow(F x, f16*) {
#if defined(__AVX512F__)
  return (U16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  return (U16)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
  return (U16)vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x));
#else
  const U u = (U)x, sign = (u >> 16) & 0x8000, rest = u & 0x7fffffff, based = rest - (112u << 23);
  const U normal = (based + 0xfff + ((based >> 13) & 1)) >> 13;
  const U denormal = bits_of(from_bits(rest) + 0.5f) - bits_of(splat(0.5f));  // its last place is 2^-24
  U out = choose((U)(rest < 0x38800000), denormal, normal);
  out = choose((U)(rest >= 0x47800000), splat_bits(0x7c00), out);
  out = choose((U)(rest > 0x7f800000), splat_bits(0x7e00), out);
  return __builtin_convertvector(sign | out, U16);
#endif
}

// Of the first n elements, 0 <= n <= LANES; the others are read as zero and not written.
template <typename T>
JAXKV_INLINE F load(const T* from) { return widen(load_bits<typename Bits<sizeof(T)>::type>(from), from); }
template <typename T>
JAXKV_INLINE F load_tail(const T* from, int64_t n) { return widen(load_bits_tail(from, n), from); }
template <typename T>
JAXKV_INLINE void store(T* to, F x) { store_bits(to, narrow(x, to)); }
template <typename T>
JAXKV_INLINE void store_tail(T* to, int64_t n, F x) { store_bits_tail(to, n, narrow(x, to)); }

// ---- sums over lanes: halves onto each other until one is left

JAXKV_INLINE F4 fold4(F x) {
#if defined(__AVX512F__)
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
  return (F4)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
  return (F4)_mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
#else
  return x;
#endif
}

JAXKV_INLINE F4 sum4(F a, F b, F c, F d) {
  const F4 p = fold4(a), q = fold4(b), r = fold4(c), s = fold4(d);
#if defined(__x86_64__)
  const F4 pq_low = (F4)_mm_unpacklo_ps((__m128)p, (__m128)q), pq_high = (F4)_mm_unpackhi_ps((__m128)p, (__m128)q);
  const F4 rs_low = (F4)_mm_unpacklo_ps((__m128)r, (__m128)s), rs_high = (F4)_mm_unpackhi_ps((__m128)r, (__m128)s);
  const F4 pq = pq_low + pq_high, rs = rs_low + rs_high;  // p0 + p2, q0 + q2, p1 + p3, q1 + q3
  return (F4)_mm_movelh_ps((__m128)pq, (__m128)rs) + (F4)_mm_movehl_ps((__m128)rs, (__m128)pq);
#else
  F4 out;
  out[0] = (p[0] + p[2]) + (p[1] + p[3]);
  out[1] = (q[0] + q[2]) + (q[1] + q[3]);
  out[2] = (r[0] + r[2]) + (r[1] + r[3]);
  out[3] = (s[0] + s[2]) + (s[1] + s[3]);
  return out;
#endif
}

// out[r] are the sums of rows[r][0] .. rows[r][3]: the bits of sum4, with fewer shuffles where there are sixteen lanes.
JAXKV_INLINE void sum4x4(const F (*rows)[4], F4* out) {
#if defined(__AVX512F__)
  const __m512i other_quarters = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
  __m512 half[2], quarter[4];
  unrolled<4>([&](auto c) JAXKV_LAMBDA {
    unrolled<2>([&](auto r) JAXKV_LAMBDA {  // lower half: row r, upper half: row r + 2
      const __m512 a = (__m512)rows[r][c], b = (__m512)rows[r + 2][c];
      half[r] = _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(1, 0, 3, 2)));
    });
    quarter[c] = _mm512_add_ps(_mm512_mask_blend_ps(0xf0f0, half[0], half[1]),  // quarter r: row r
                               _mm512_permutex2var_ps(half[0], other_quarters, half[1]));
  });
  const __m512 pq = _mm512_add_ps(_mm512_unpacklo_ps(quarter[0], quarter[1]), _mm512_unpackhi_ps(quarter[0], quarter[1]));
  const __m512 rs = _mm512_add_ps(_mm512_unpacklo_ps(quarter[2], quarter[3]), _mm512_unpackhi_ps(quarter[2], quarter[3]));
  const __m512d a = _mm512_castps_pd(pq), b = _mm512_castps_pd(rs);
  const __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  __builtin_memcpy(out, &all, sizeof all);
#else
  unrolled<4>([&](auto r) JAXKV_LAMBDA { out[r] = sum4(rows[r][0], rows[r][1], rows[r][2], rows[r][3]); });
#endif
}

JAXKV_INLINE float sum(F x) {
  const F4 p = fold4(x);
  return (p[0] + p[2]) + (p[1] + p[3]);
}

JAXKV_INLINE float max_of(F x) {
  float out = x[0];
  for (int i = 1; i < LANES; ++i) out = x[i] > out ? x[i] : out;
  return out;
}

// ---- parts of a vector

// Stores the first n of four floats.
template <typename T>
JAXKV_INLINE void store4(T* to, int64_t n, F4 x) {
  float lanes[LANES] = {};
  __builtin_memcpy(lanes, &x, sizeof x);
  store_tail(to, n, load(lanes));
}
JAXKV_INLINE void store4(float* to, int64_t n, F4 x) {
  if (n == 4) return __builtin_memcpy(to, &x, sizeof x), void();
  for (int64_t i = 0; i < n; ++i) to[i] = x[i];
}


template <typename T>
JAXKV_INLINE float load_one(const T* from) { return load_tail(from, 1)[0]; }
template <typename T>
JAXKV_INLINE void store_one(T* to, float x) { store_tail(to, 1, splat(x)); }

}  // namespace
}  // namespace JAXKV_TARGET
}  // namespace jaxkv
