// Dot products along the last axis, which is the sum's axis of both operands: nothing is transposed or packed.
//
// A tile is X rows of x by four of the weight, with one vector of partial sums for each element. The vectors of a row pass in one order,
// and are added up in one order, whatever X is and wherever the tile lies.
//
// x is read as float32. A vector of bfloat16 is widened as pairs: the lower halves of 32 bits, then the upper ones, which costs two
// instructions for two vectors. `prepare` brings rows of x into the same order. The weight is widened in registers for few rows, and for
// many once a block of columns into scratch.
//
// Loops, from the outside: blocks of columns, whose weights stay in the second cache; chunks of the width, between which sums lie in
// scratch; tiles of rows, whose chunk of x stays in the first cache; and the tiles of the block's columns.
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

// Pairs of bfloat16, 32 bits each.
struct PairReader {
  static constexpr int ELEMENTS = 2 * LANES;
  static JAXKV_INLINE U bits(const bf16* from) { return load_bits<U>(from); }
  static JAXKV_INLINE U tail(const bf16* from, int64_t n) {
    U out = {};
    __builtin_memcpy(&out, from, size_t(n) * sizeof(bf16));
    return out;
  }
};

#if defined(__AVX512BF16__)
// Pairs are multiplied and added as they are, with rounding of its own.
template <>
struct Reader<bf16> : PairReader {
  typedef bf16 Row;
  static constexpr int PARTS = 1;
  static JAXKV_INLINE U part(U bits, int) { return bits; }
  static JAXKV_INLINE U row(const bf16* x, int) { return load_bits<U>(x); }
  static JAXKV_INLINE F multiply_add(U a, U b, F c) { return (F)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b); }
};
#else
template <>
struct Reader<bf16> : PairReader {
  typedef float Row;
  static constexpr int PARTS = 2;
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

// One chunk of the width for a tile: begins with sums of zero or those at `sums`, and leaves them there or, after the last, gives totals.
struct Chunk {
  int64_t begin, end;
  bool first, last;
  int64_t ahead;  // bytes from a weight to the one that is fetched from memory meanwhile; 0 where they lie in a cache
};

template <typename T, int ROWS, bool AHEAD>
JAXKV_INLINE void tile(const T* const (&weight)[W], const typename Reader<T>::Row* x, int64_t stride, const Chunk& chunk, float* saved,
                       F4 (&out)[ROWS]) {
  typedef Reader<T> R;
  F sums[ROWS][W] = {};
  if (!chunk.first) {
    unrolled<ROWS * W>([&](auto i) JAXKV_LAMBDA { sums[i / W][i % W] = load(saved + i * LANES); });
  }
  int64_t k = chunk.begin;
  for (; k + R::ELEMENTS <= chunk.end; k += R::ELEMENTS) {
    if constexpr (AHEAD) unrolled<W>([&](auto w) JAXKV_LAMBDA { __builtin_prefetch((const char*)(weight[w] + k) + chunk.ahead); });
    const decltype(R::bits(nullptr)) bits[W] = {R::bits(weight[0] + k), R::bits(weight[1] + k), R::bits(weight[2] + k),
                                                R::bits(weight[3] + k)};
    add_step<T>(sums, bits, x + k, stride);
  }
  if (k < chunk.end) {
    const int64_t n = chunk.end - k;
    const decltype(R::bits(nullptr)) bits[W] = {R::tail(weight[0] + k, n), R::tail(weight[1] + k, n), R::tail(weight[2] + k, n),
                                                R::tail(weight[3] + k, n)};
    add_step<T>(sums, bits, x + k, stride);
  }
  if (chunk.last) return totals(sums, out);
  unrolled<ROWS * W>([&](auto i) JAXKV_LAMBDA { store(saved + i * LANES, sums[i / W][i % W]); });
}

JAXKV_INLINE int64_t number_of(const Rows& p, int64_t row) { return p.numbers == nullptr ? row : p.numbers[row]; }

// Columns [column, column + columns) of y, and where their weights stand: as T or widened, `stride` apart.
template <typename S>
struct Columns {
  int64_t column, columns;
  const S* weight;
  int64_t stride;
};

// The tiles of ROWS rows from `row` on.
template <typename T, typename S, int ROWS, bool AHEAD>
void tiles_of_rows(const Rows& p, const Columns<S>& block, const typename Reader<S>::Row* x, int64_t stride, int64_t row,
                   const Chunk& chunk, float* saved) {
  for (int64_t c = 0; c < block.columns; c += W) {
    const int64_t n = block.columns - c < W ? block.columns - c : W;
    const S* weight[W];
    for (int w = 0; w < W; ++w) weight[w] = block.weight + (c + (w < n ? w : 0)) * block.stride;
    F4 out[ROWS];
    tile<S, ROWS, AHEAD>(weight, x + row * stride, stride, chunk, saved + c * X * LANES, out);
    if (!chunk.last) continue;
    for (int r = 0; r < ROWS; ++r) {
      store4(static_cast<T*>(p.y) + number_of(p, row + r) * p.outputs + block.column + c, n, out[r]);
    }
  }
}

constexpr int64_t WIDEN_FROM = 2 * X + 1;                      // rows
constexpr int64_t BLOCK_BYTES = 192 << 10, MOST_COLUMNS = 64;  // of weights as float32
constexpr int64_t CHUNK = 768;                                 // a multiple of every ELEMENTS
constexpr int64_t FAR = 24 << 10;                              // what is fetched so much ahead may be gone from the first cache

// Columns of a block: a multiple of a line of y.
JAXKV_INLINE int64_t block_columns(const Rows& p) {
  const int64_t fit = BLOCK_BYTES / (p.width * 4) / 16 * 16;
  return fit < 16 ? 16 : fit > MOST_COLUMNS ? MOST_COLUMNS : fit;
}

template <typename T, typename S>
JAXKV_INLINE void block_of(const Rows& p, const Part& part, const Columns<S>& block, int64_t width, const typename Reader<S>::Row* x,
                           int64_t stride, float* saved) {
  constexpr bool FROM_MEMORY = sizeof(T) == sizeof(S);
  const int64_t rows = part.row_end - part.row_begin, tiles = (rows + X - 1) / X, length = tiles == 1 ? width : CHUNK;
  Chunk chunk;
  chunk.ahead = W * block.stride * int64_t(sizeof(S));
  if (tiles == 1 && chunk.ahead > FAR) chunk.ahead = FAR / W;
  for (chunk.begin = 0; chunk.begin < width; chunk.begin = chunk.end) {
    chunk.end = width - chunk.begin < length ? width : chunk.begin + length;
    chunk.first = chunk.begin == 0, chunk.last = chunk.end == width;
    for (int64_t i = 0; i < tiles; ++i) {  // of nearly equal heights
      const int64_t begin = rows * i / tiles, height = rows * (i + 1) / tiles - begin, row = part.row_begin + begin;
      float* sums = saved + i * MOST_COLUMNS * X * LANES;
      unrolled<X>([&](auto less) JAXKV_LAMBDA {
        constexpr int ROWS = X - less;
        if (height != ROWS) return;
        if (FROM_MEMORY && i == 0) return tiles_of_rows<T, S, ROWS, FROM_MEMORY>(p, block, x, stride, row, chunk, sums);
        tiles_of_rows<T, S, ROWS, false>(p, block, x, stride, row, chunk, sums);
      });
    }
  }
}

// Bytes of sums between chunks, and of a block of columns widened.
JAXKV_INLINE int64_t sums_bytes(const Rows& p, int64_t rows) {
  return rows <= X || p.width <= CHUNK ? 0 : (rows + X - 1) / X * MOST_COLUMNS * X * VECTOR_BYTES;
}

template <typename T>
void part_of(const Rows& p, const Part& part) {
  typedef typename Reader<T>::Row Row;
  const int64_t padded = padded_width<T>(p.width), columns = block_columns(p), rows = part.row_end - part.row_begin;
  const Row* x = static_cast<const Row*>(part.x == nullptr ? p.x : part.x);
  const int64_t stride = part.x == nullptr ? p.width : padded;
  float* saved = static_cast<float*>(part.scratch);
  for (int64_t column = part.begin; column < part.end; column += columns) {
    const int64_t n = part.end - column < columns ? part.end - column : columns;
    const T* weight = static_cast<const T*>(p.weight) + column * p.width;
    if constexpr (WIDENED<T>) {
      if (rows >= WIDEN_FROM) {
        Row* wide = reinterpret_cast<Row*>(static_cast<char*>(part.scratch) + sums_bytes(p, rows));
        for (int64_t c = 0; c < n; ++c) prepare_row(weight + c * p.width, p.width, wide + c * padded);
        block_of<T, Row>(p, part, Columns<Row>{column, n, wide, padded}, padded, x, stride, saved);
        continue;
      }
    }
    block_of<T, T>(p, part, Columns<T>{column, n, weight, p.width}, p.width, x, stride, saved);
  }
}

template <typename T>
int64_t row_bytes_of(const Rows& p) {
  const int64_t padded = padded_width<T>(p.width);
  return WIDENED<T> || padded != p.width || p.numbers != nullptr ? padded * int64_t(sizeof(typename Reader<T>::Row)) : 0;
}

template <typename T>
void prepare_rows(const Rows& p, int64_t begin, int64_t end, void* to) {
  for (int64_t r = begin; r < end; ++r) {
    prepare_row(static_cast<const T*>(p.x) + number_of(p, r) * p.width, p.width,
                static_cast<typename Reader<T>::Row*>(to) + r * padded_width<T>(p.width));
  }
}

int64_t row_bytes(const Rows& p) {
  if (p.dtype == Dtype::float32) return row_bytes_of<float>(p);
  return p.dtype == Dtype::bfloat16 ? row_bytes_of<bf16>(p) : row_bytes_of<f16>(p);
}

void prepare(const Rows& p, int64_t begin, int64_t end, void* to) {
  if (p.dtype == Dtype::float32) return prepare_rows<float>(p, begin, end, to);
  return p.dtype == Dtype::bfloat16 ? prepare_rows<bf16>(p, begin, end, to) : prepare_rows<f16>(p, begin, end, to);
}

int64_t scratch_bytes(const Rows& p, int64_t rows) {
  return sums_bytes(p, rows) + (rows < WIDEN_FROM ? 0 : block_columns(p) * row_bytes(p));
}

void part(const Rows& p, const Part& given) {
  if (p.dtype == Dtype::float32) return part_of<float>(p, given);
  return p.dtype == Dtype::bfloat16 ? part_of<bf16>(p, given) : part_of<f16>(p, given);
}

}  // namespace

const ProductKernels& product_kernels() {
  static constexpr ProductKernels table = {row_bytes, prepare, scratch_bytes, part};
  return table;
}

}  // namespace JAXKV_TARGET
}  // namespace jaxkv
