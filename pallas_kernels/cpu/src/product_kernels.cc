// Dot products along the last axis, which is the sum's axis of both operands: nothing is transposed or packed.
//
// A tile is X rows of x by four of the weight, with one vector of partial sums for each element. The vectors of a row pass in one order,
// and are added up in one order, whatever X is and wherever the tile lies.
//
// x is read as float32. A vector of bfloat16 is widened as pairs: the lower halves of 32 bits, then the upper ones, which costs two
// instructions for two vectors. `prepare` brings rows of x into the same order. The weight is widened in registers for few rows, and for
// many once a tile into scratch that stays in the first cache.
#include "product.h"
#include "simd.h"

namespace jaxkv {
namespace JAXKV_TARGET {
namespace {

constexpr int W = 4;  // rows of the weight in a tile
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int X = 6;  // rows of x at most: W * X sums, W or X vectors and two more fit into the registers
#elif defined(__AVX2__)
constexpr int X = 3;
#else
constexpr int X = 2;
#endif

// How T is read: ELEMENTS at a time as bits, then as PARTS operands of multiply_add, whose other operand is a vector of x. x stands in
// memory as `Row`, with zeros up to whole steps.
template <typename T>
struct Reader {
  typedef float Row;
  static constexpr int PARTS = 1, ELEMENTS = LANES;
  static JAXKV_INLINE auto bits(const T* from) { return load_bits<typename Bits<sizeof(T)>::type>(from); }
  static JAXKV_INLINE auto tail(const T* from, int64_t n) { return load_bits_tail(from, n); }
  template <typename V>
  static JAXKV_INLINE F part(V bits, int) { return widen(bits, (const T*)nullptr); }
  static JAXKV_INLINE F row(const float* x, int) { return load(x); }
  static JAXKV_INLINE F multiply_add(F a, F b, F c) { return fma(a, b, c); }
};

JAXKV_INLINE U pairs_tail(const bf16* from, int64_t n) {
  U out = {};
  __builtin_memcpy(&out, from, size_t(n) * sizeof(bf16));
  return out;
}

#if defined(__AVX512BF16__)
// Pairs are multiplied and added as they are, with rounding of its own.
template <>
struct Reader<bf16> {
  typedef bf16 Row;
  static constexpr int PARTS = 1, ELEMENTS = 2 * LANES;
  static JAXKV_INLINE U bits(const bf16* from) { return load_bits<U>(from); }
  static JAXKV_INLINE U tail(const bf16* from, int64_t n) { return pairs_tail(from, n); }
  static JAXKV_INLINE U part(U bits, int) { return bits; }
  static JAXKV_INLINE U row(const bf16* x, int) { return load_bits<U>(x); }
  static JAXKV_INLINE F multiply_add(U a, U b, F c) { return (F)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b); }
};
#else
template <>
struct Reader<bf16> {
  typedef float Row;
  static constexpr int PARTS = 2, ELEMENTS = 2 * LANES;
  static JAXKV_INLINE U bits(const bf16* from) { return load_bits<U>(from); }
  static JAXKV_INLINE U tail(const bf16* from, int64_t n) { return pairs_tail(from, n); }
  static JAXKV_INLINE F part(U bits, int i) { return (F)(i == 0 ? bits << 16 : bits & 0xffff0000); }
  static JAXKV_INLINE F row(const float* x, int i) { return load(x + i * LANES); }
  static JAXKV_INLINE F multiply_add(F a, F b, F c) { return fma(a, b, c); }
};
#endif

template <typename T>
JAXKV_INLINE int64_t padded_width(int64_t width) {
  return (width + Reader<T>::ELEMENTS - 1) / Reader<T>::ELEMENTS * Reader<T>::ELEMENTS;
}

template <typename T>
constexpr bool WIDENED = sizeof(typename Reader<T>::Row) != sizeof(T);

// A row of x as `part` reads it, with zeros behind it.
template <typename T>
JAXKV_INLINE void prepare_row(const T* from, int64_t width, typename Reader<T>::Row* to) {
  typedef Reader<T> R;
  const auto step = [&](auto bits, int64_t k) JAXKV_LAMBDA {
    if constexpr (WIDENED<T>) {
      for (int i = 0; i < R::PARTS; ++i) store(to + k + i * LANES, R::part(bits, i));
    } else {
      store_bits(to + k, bits);
    }
  };
  int64_t k = 0;
  for (; k + R::ELEMENTS <= width; k += R::ELEMENTS) step(R::bits(from + k), k);
  if (k < width) step(R::tail(from + k, width - k), k);
}

// One step: ELEMENTS of each row.
template <typename T, int ROWS, typename V>
JAXKV_INLINE void add_step(F (&sums)[ROWS][W], const V (&weight)[W], const typename Reader<T>::Row* x, int64_t stride) {
  typedef Reader<T> R;
  unrolled<R::PARTS>([&](auto i) JAXKV_LAMBDA {
    decltype(R::row(x, 0)) rows[ROWS];
    unrolled<ROWS>([&](auto r) JAXKV_LAMBDA { rows[r] = R::row(x + r * stride, i); });
    unrolled<W>([&](auto w) JAXKV_LAMBDA {
      const auto column = R::part(weight[w], i);
      unrolled<ROWS>([&](auto r) JAXKV_LAMBDA { sums[r][w] = R::multiply_add(column, rows[r], sums[r][w]); });
    });
  });
}

template <int ROWS>
JAXKV_INLINE void totals(const F (&sums)[ROWS][W], F4 (&out)[ROWS]) {
  constexpr int FOURS = ROWS / 4;
  unrolled<FOURS>([&](auto i) JAXKV_LAMBDA { sum4x4(sums + 4 * i, out + 4 * i); });
  unrolled<ROWS - 4 * FOURS>([&](auto i) JAXKV_LAMBDA {
    const auto& row = sums[4 * FOURS + i];
    out[4 * FOURS + i] = sum4(row[0], row[1], row[2], row[3]);
  });
}

// The tile of ROWS rows from x on and the rows of the weight at `weight`, of which n are real.
template <typename T, int ROWS>
JAXKV_INLINE void tile(const T* const (&weight)[W], int64_t width, const typename Reader<T>::Row* x, int64_t stride, F4 (&out)[ROWS]) {
  typedef Reader<T> R;
  F sums[ROWS][W] = {};
  int64_t k = 0;
  for (; k + R::ELEMENTS <= width; k += R::ELEMENTS) {
    const decltype(R::bits(nullptr)) bits[W] = {R::bits(weight[0] + k), R::bits(weight[1] + k), R::bits(weight[2] + k),
                                                R::bits(weight[3] + k)};
    add_step<T>(sums, bits, x + k, stride);
  }
  if (k < width) {
    const int64_t n = width - k;
    const decltype(R::bits(nullptr)) bits[W] = {R::tail(weight[0] + k, n), R::tail(weight[1] + k, n), R::tail(weight[2] + k, n),
                                                R::tail(weight[3] + k, n)};
    add_step<T>(sums, bits, x + k, stride);
  }
  totals(sums, out);
}

// The tile of y at (row, column), n columns wide. S is how the weight stands in memory: as T, or widened.
template <typename T, typename S, int ROWS>
void tile_of_y(const Product& p, const S* const (&weight)[W], int64_t width, const typename Reader<S>::Row* x, int64_t stride,
               int64_t row, int64_t column, int64_t n) {
  F4 out[ROWS];
  tile<S, ROWS>(weight, width, x + row * stride, stride, out);
  T* y = static_cast<T*>(p.y) + row * p.outputs + column;
  for (int r = 0; r < ROWS; ++r) store4(y + r * p.outputs, n, out[r]);
}

// The tiles of all rows of the part.
template <typename T, typename S>
JAXKV_INLINE void column_of_tiles(const Product& p, const Part& part, const S* const (&weight)[W], int64_t width,
                                  const typename Reader<S>::Row* x, int64_t stride, int64_t column, int64_t n) {
  const int64_t rows = part.row_end - part.row_begin, tiles = (rows + X - 1) / X;
  for (int64_t i = 0; i < tiles; ++i) {  // of nearly equal heights
    const int64_t begin = rows * i / tiles, height = rows * (i + 1) / tiles - begin;
    unrolled<X>([&](auto less) JAXKV_LAMBDA {
      constexpr int ROWS = X - less;
      if (height == ROWS) tile_of_y<T, S, ROWS>(p, weight, width, x, stride, part.row_begin + begin, column, n);
    });
  }
}

constexpr int64_t WIDEN_FROM = 2 * X + 1;  // rows

template <typename T>
void part_of(const Product& p, const Part& part) {
  typedef typename Reader<T>::Row Row;
  const int64_t padded = padded_width<T>(p.width);
  const Row* x = static_cast<const Row*>(part.x == nullptr ? p.x : part.x);
  const int64_t stride = part.x == nullptr ? p.width : padded;
  for (int64_t column = part.begin; column < part.end; column += W) {
    const int64_t n = part.end - column < W ? part.end - column : W;
    const T* weight[W];
    for (int w = 0; w < W; ++w) weight[w] = static_cast<const T*>(p.weight) + (column + (w < n ? w : 0)) * p.width;
    if constexpr (WIDENED<T>) {
      if (part.row_end - part.row_begin >= WIDEN_FROM) {
        Row* scratch = static_cast<Row*>(part.weight_scratch);
        const Row* wide[W];
        for (int w = 0; w < W; ++w) {
          prepare_row(weight[w], p.width, scratch + w * padded);
          wide[w] = scratch + w * padded;
        }
        column_of_tiles<T, Row>(p, part, wide, padded, x, stride, column, n);
        continue;
      }
    }
    column_of_tiles<T, T>(p, part, weight, p.width, x, stride, column, n);
  }
}

template <typename T>
int64_t row_bytes_of(const Product& p) {
  const int64_t padded = padded_width<T>(p.width);
  return WIDENED<T> || padded != p.width ? padded * int64_t(sizeof(typename Reader<T>::Row)) : 0;
}

template <typename T>
void prepare_rows(const Product& p, int64_t begin, int64_t end, void* to) {
  for (int64_t r = begin; r < end; ++r) {
    prepare_row(static_cast<const T*>(p.x) + r * p.width, p.width,
                static_cast<typename Reader<T>::Row*>(to) + r * padded_width<T>(p.width));
  }
}

int64_t row_bytes(const Product& p) {
  if (p.dtype == Dtype::float32) return row_bytes_of<float>(p);
  return p.dtype == Dtype::bfloat16 ? row_bytes_of<bf16>(p) : row_bytes_of<f16>(p);
}

void prepare(const Product& p, int64_t begin, int64_t end, void* to) {
  if (p.dtype == Dtype::float32) return prepare_rows<float>(p, begin, end, to);
  return p.dtype == Dtype::bfloat16 ? prepare_rows<bf16>(p, begin, end, to) : prepare_rows<f16>(p, begin, end, to);
}

int64_t weight_bytes(const Product& p) { return p.rows < WIDEN_FROM ? 0 : W * row_bytes(p); }

void part(const Product& p, const Part& given) {
  if (p.dtype == Dtype::float32) return part_of<float>(p, given);
  return p.dtype == Dtype::bfloat16 ? part_of<bf16>(p, given) : part_of<f16>(p, given);
}

}  // namespace

const ProductKernels& product_kernels() {
  static constexpr ProductKernels table = {row_bytes, prepare, weight_bytes, part};
  return table;
}

}  // namespace JAXKV_TARGET
}  // namespace jaxkv
