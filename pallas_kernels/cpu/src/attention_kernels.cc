// Attention of one part's query rows over its blocks: online softmax, in float32, block by block at fixed positions.
//
// The state after a block depends on the row's own keys alone: a block that a row does not see leaves it as it is, to the bit. Blocks are
// taken in spans of SPAN_BLOCKS, each from an empty state, and the spans merged in their order, whether one thread takes them or several.
// So a query's bits depend neither on the queries that run with it, nor on threads, pages or tables.
#include "attention_lanes.h"
#include "attention_rows.h"

namespace jaxkv {
namespace JAXKV_TARGET {
namespace {

template <typename Q>
void load_queries(const Attention& call, const Part& part, const Tile& tile) {
  const auto query_row = [&](int64_t row) {
    const int64_t m = part.first_row + tile.first + row, query = m / call.q_per_kv, head = part.kv_head * call.q_per_kv + m % call.q_per_kv;
    return static_cast<const Q*>(call.q) + ((part.row * call.queries + query) * call.kv_heads * call.q_per_kv + head) * call.head_dim;
  };
  const int64_t width = tile.vectors * LANES;
  for (int64_t d = 0; d < call.head_dim; d += LANES) {
    const int64_t n = call.head_dim - d;
    if (tile.vectors == 0)
      for (int m = 0; m < tile.rows; ++m) store_some(tile.q + m * call.head_dim + d, n, load_some(query_row(m) + d, n));
    for (int m = 0; m < width; m += LANES) {
      F x[LANES];
      for (int i = 0; i < LANES; ++i) x[i] = m + i < tile.rows ? load_some(query_row(m + i) + d, n) : F{};
      transpose(x);
      for (int i = 0; i < LANES; ++i) store(tile.q + (d + i) * width + m, x[i]);
    }
  }
}

// Cuts the part's rows into tiles; returns their number.
int make_tiles(const Attention& call, const Part& part, const Scratch& room, Tile (&tiles)[MOST_TILES]) {
  const int64_t wide = wide_of(call.head_dim);
  int count = 0;
  for (int32_t at = 0; at < part.rows; ++count) {
    const int32_t left = int32_t(part.rows) - at;
    Tile& tile = tiles[count];
    tile.vectors = left > LANES ? 2 : 2 * left >= LANES ? 1 : 0;
    tile.first = at, tile.rows = tile.vectors == 0 || left < tile.vectors * LANES ? left : tile.vectors * LANES;
    tile.q = room.q + at * wide, tile.values = room.values + at * wide, tile.top = room.top + at, tile.total = room.total + at;
    at += tile.rows;
    switch (call.q_dtype) {
      case Dtype::float32: load_queries<float>(call, part, tile); break;
      case Dtype::bfloat16: load_queries<bf16>(call, part, tile); break;
      default: load_queries<f16>(call, part, tile);
    }
  }
  return count;
}

template <typename T>
const WideBlock& widened(const Attention& call, const Block<T>& block, const Scratch& room, WideBlock* out) {
  const int64_t wide = wide_of(call.head_dim);
  out->low = block.low, out->high = block.high, out->k_scale = block.k_scale, out->v_scale = block.v_scale;
  for (int32_t t = block.low; t < block.high; ++t) {
    if constexpr (sizeof(T) == 4) {
      out->k[t] = block.k[t], out->v[t] = block.v[t];
    } else {
      out->k[t] = room.k + t * wide, out->v[t] = room.v + t * wide;
      for (int64_t d = 0; d < call.head_dim; d += LANES) {
        store(room.k + t * wide + d, load_some(block.k[t] + d, call.head_dim - d));
        store(room.v + t * wide + d, load_some(block.v[t] + d, call.head_dim - d));
      }
    }
  }
  for (int i = 0; i < KEYS_AT_ONCE; ++i) out->k[block.high + i] = out->k[block.high - 1];
  return *out;
}

template <typename T>
void tiles_over_block(const Attention& call, const Part& part, const Tile* tiles, int count, int64_t number, const Block<T>& block,
                      const Block<T>& next, const Scratch& room) {
  if (block.low >= block.high) return;
  WideBlock wide;
  if (tiles[0].vectors != 0) widened(call, block, room, &wide);
  if (tiles[count - 1].vectors == 0) turn_keys(block, next, call.head_dim, room.k_turned);
  for (int i = 0; i < count; ++i) {
    switch (tiles[i].vectors) {
      case 0: rows_over_block(call, part, tiles[i], block, number, room); break;
      case 1: lanes_over_block<1>(call, part, tiles[i], wide, number, room.scores); break;
      default: lanes_over_block<2>(call, part, tiles[i], wide, number, room.scores);
    }
  }
}

// The tiles' state as a partial result: top [rows], total [rows], values [rows, head_dim].
void give_partial(const Attention& call, const Part& part, const Tile* tiles, int count, float* out) {
  const int64_t wide = wide_of(call.head_dim);
  for (int i = 0; i < count; ++i) {
    const Tile& tile = tiles[i];
    float* const values = out + 2 * part.rows + tile.first * call.head_dim;
    __builtin_memcpy(out + tile.first, tile.top, size_t(tile.rows) * sizeof(float));
    __builtin_memcpy(out + part.rows + tile.first, tile.total, size_t(tile.rows) * sizeof(float));
    for (int64_t d = 0; d < call.head_dim; d += LANES) {
      const int64_t n = call.head_dim - d;
      if (tile.vectors == 0)
        for (int m = 0; m < tile.rows; ++m) store_some(values + m * call.head_dim + d, n, load(tile.values + m * wide + d));
      for (int m = 0; m < tile.vectors * LANES; m += LANES) {
        F x[LANES];
        for (int j = 0; j < LANES; ++j) x[j] = j < n ? load(tile.values + (d + j) * tile.vectors * LANES + m) : F{};
        transpose(x);
        for (int j = 0; j < LANES && m + j < tile.rows; ++j) store_some(values + (m + j) * call.head_dim + d, n, x[j]);
      }
    }
  }
}

// `next`, the partial result of the keys behind those of `into`, joins it.
void merge_partial(int64_t rows, int64_t head_dim, float* into, const float* next) {
  for (int64_t m = 0; m < rows; ++m) {
    const F old = splat(into[m]), other = splat(next[m]), top = max(other, old);
    const F decay = exp_of(old - top), other_decay = exp_of(other - top);
    into[m] = top[0];
    into[rows + m] = fma(splat(into[rows + m]), decay, splat(next[rows + m]) * other_decay)[0];
    float* const values = into + 2 * rows + m * head_dim;
    const float* const more = next + 2 * rows + m * head_dim;
    for (int64_t d = 0; d < head_dim; d += LANES) {
      const int64_t n = head_dim - d;
      store_some(values + d, n, fma(load_some(values + d, n), decay, load_some(more + d, n) * other_decay));
    }
  }
}

template <typename Q>
void write_results(const Attention& call, const Part& part, const float* partial) {
  for (int64_t i = 0; i < part.rows; ++i) {
    const int64_t m = part.first_row + i, query = m / call.q_per_kv, head = part.kv_head * call.q_per_kv + m % call.q_per_kv;
    const int64_t at = (part.row * call.queries + query) * call.kv_heads * call.q_per_kv + head;
    F top = splat(partial[i]), total = splat(partial[part.rows + i]), decay = splat(1.0f);
    if (call.sinks != nullptr) {
      const F sink = splat(call.sinks[head]), most = max(sink, top);
      decay = exp_of(top - most), total = fma(total, decay, exp_of(sink - most)), top = most;
    }
    const float* const values = partial + 2 * part.rows + i * call.head_dim;
    for (int64_t d = 0; d < call.head_dim; d += LANES) {
      const int64_t n = call.head_dim - d;
      const F x = load_some(values + d, n) * decay / total + F{};  // + 0: whether a row was beside others might show in the sign of zero
      store_some(static_cast<Q*>(call.out) + at * call.head_dim + d, n, x);
    }
    call.lse[at] = top[0] + __builtin_logf(total[0]);
  }
}

void write_results(const Attention& call, const Part& part, const float* partial) {
  switch (call.q_dtype) {
    case Dtype::float32: return write_results<float>(call, part, partial);
    case Dtype::bfloat16: return write_results<bf16>(call, part, partial);
    default: return write_results<f16>(call, part, partial);
  }
}

template <typename T>
void attend_pages(const Attention& call, const Part& part, float* memory) {
  const Scratch room(memory, call.head_dim);
  Tile tiles[MOST_TILES];
  const int count = make_tiles(call, part, room, tiles);
  Block<T> blocks[2];
  find(call, part, part.begin_block, &blocks[part.begin_block % 2]);
  bool begun = false;
  for (int64_t begin = part.begin_block; begin < part.end_block;) {
    const int64_t cut = (begin / SPAN_BLOCKS + 1) * SPAN_BLOCKS, end = cut < part.end_block ? cut : part.end_block;
    for (int64_t i = 0; i < PART_ROWS; ++i) room.top[i] = LOWEST, room.total[i] = 0;
    __builtin_memset(room.values, 0, size_t(PART_ROWS * wide_of(call.head_dim)) * sizeof(float));
    for (int64_t i = begin; i < end; ++i) {
      Block<T>& next = blocks[(i + 1) % 2];
      next.low = next.high = 0;
      if (i + 1 < part.end_block) find(call, part, i + 1, &next);
      tiles_over_block(call, part, tiles, count, i, blocks[i % 2], next, room);
    }
    float* const out = part.partial != nullptr ? part.partial : begun ? room.next : room.running;
    give_partial(call, part, tiles, count, out);
    if (begun) merge_partial(part.rows, call.head_dim, room.running, room.next);
    begun = true, begin = end;
  }
  if (part.partial == nullptr) write_results(call, part, room.running);
}

void attend(const Attention& call, const Part& part, float* scratch) {
  switch (call.page_dtype) {
    case Dtype::float32: return attend_pages<float>(call, part, scratch);
    case Dtype::bfloat16: return attend_pages<bf16>(call, part, scratch);
    case Dtype::float16: return attend_pages<f16>(call, part, scratch);
    case Dtype::int8: return attend_pages<int8_t>(call, part, scratch);
    case Dtype::float8_e4m3fn: return attend_pages<f8e4m3fn>(call, part, scratch);
    case Dtype::float8_e5m2: return attend_pages<f8e5m2>(call, part, scratch);
  }
}

void merge(const Attention& call, const Part& part, int64_t count) {
  const int64_t size = part.rows * (call.head_dim + 2);
  for (int64_t i = 1; i < count; ++i) merge_partial(part.rows, call.head_dim, part.partial, part.partial + i * size);
  write_results(call, part, part.partial);
}

}  // namespace

const AttentionKernels& attention_kernels() {
  static constexpr AttentionKernels kernels{scratch_floats, attend, merge, [](float x) { return exp_of(splat(x))[LANES - 1]; },
                                            [](float x) { return tanh_of(splat(x))[LANES - 1]; }};
  return kernels;
}

}  // namespace JAXKV_TARGET
}  // namespace jaxkv
