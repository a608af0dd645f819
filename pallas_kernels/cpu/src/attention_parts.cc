#include "attention_parts.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

namespace jaxkv {
namespace {

struct Free {
  void operator()(float* memory) const { ::operator delete[](memory, std::align_val_t(64)); }
};
typedef std::unique_ptr<float[], Free> Floats;

Floats make_floats(int64_t count) { return Floats(new (std::align_val_t(64)) float[size_t(count)]); }

// The calling thread's own; it lives as long as the thread.
float* scratch_of(int64_t floats) {
  thread_local Floats memory;
  thread_local int64_t size = 0;
  if (size < floats) memory.reset(), memory = make_floats(floats), size = floats;
  return memory.get();
}

// Parts whose partial results make one; whoever ends the last of them merges all, in their order.
struct Group {
  Part whole;
  int64_t count;
  std::atomic<int64_t> left;
  Group(const Part& whole, int64_t count) : whole(whole), count(count), left(count) {}
};

struct Item {
  Part part;
  Group* group;  // null where the part writes its result itself
};

// Live queries of a row are those from `begin` to `end` - 1; the others' results are 0 and -inf.
struct Live {
  int64_t first, begin, end;
};

Live live_queries(const Attention& call, int64_t row) {
  const int64_t room = call.pages_per_seq * call.page_size, length = std::clamp<int64_t>(call.lengths[row], 0, room);
  const int64_t first = length - call.num_queries[row];
  const int64_t end = std::clamp<int64_t>(call.num_queries[row], 0, call.queries);
  return {first, std::clamp<int64_t>(-first, 0, end), end};
}

size_t bytes_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : dtype == Dtype::bfloat16 || dtype == Dtype::float16 ? 2 : 1; }

void clear_queries(const Attention& call, int64_t row, int64_t begin, int64_t end) {
  if (begin >= end) return;
  const int64_t heads = call.kv_heads * call.q_per_kv, at = (row * call.queries + begin) * heads, count = (end - begin) * heads;
  const size_t bytes = bytes_of(call.q_dtype) * size_t(call.head_dim);
  std::memset(static_cast<char*>(call.out) + size_t(at) * bytes, 0, size_t(count) * bytes);
  std::fill_n(call.lse + at, count, -INFINITY);
}

// The row's live query rows, in parts of at most `rows`: those of one kv head after each other, since they read the same keys, and the
// last ones, which see most, first.
void add_parts(const Attention& call, int64_t row, const Live& live, int64_t rows, std::vector<Part>* out) {
  for (int64_t kv_head = 0; kv_head < call.kv_heads; ++kv_head) {
    const int64_t begin = live.begin * call.q_per_kv, end = live.end * call.q_per_kv;
    for (int64_t at = begin + (end - begin - 1) / rows * rows; at >= begin && at < end; at -= rows) {
      Part part{row, kv_head, at, std::min(rows, end - at), live.first, 0, 0, nullptr};
      const int64_t own = live.first + at / call.q_per_kv, last = live.first + (at + part.rows - 1) / call.q_per_kv;
      if (call.window != 0 && own >= call.window) part.begin_block = (own - call.window + 1) / BLOCK;
      part.end_block = last / BLOCK + 1;
      out->push_back(part);
    }
  }
}

std::vector<Part> make_parts(const Attention& call, int64_t threads) {
  std::vector<Live> live;
  int64_t most_rows = 0;
  for (int64_t row = 0; row < call.batch; ++row) {
    live.push_back(live_queries(call, row));
    most_rows += (live[size_t(row)].end - live[size_t(row)].begin) * call.q_per_kv * call.kv_heads;
    clear_queries(call, row, 0, live[size_t(row)].begin);
    clear_queries(call, row, live[size_t(row)].end, call.queries);
  }
  int64_t rows = PART_ROWS;
  while (threads > 1 && rows > 16 && most_rows / rows < 4 * threads) rows /= 2;
  std::vector<int64_t> order(static_cast<size_t>(call.batch));
  std::iota(order.begin(), order.end(), 0);
  const auto length = [&](int64_t row) { return live[size_t(row)].first + live[size_t(row)].end; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return length(a) > length(b); });
  std::vector<Part> parts;
  for (const int64_t row : order) add_parts(call, row, live[size_t(row)], rows, &parts);
  return parts;
}

int64_t cost_of(const Attention& call, const Part& part) {
  return (part.end_block - part.begin_block) * BLOCK * (part.rows + 4) * call.head_dim;
}

int64_t spans_of(const Part& part) { return (part.end_block - 1) / SPAN_BLOCKS - part.begin_block / SPAN_BLOCKS + 1; }

constexpr int64_t COST_OF_A_THREAD = 1 << 16;  // multiplications that are worth waking one

}  // namespace

void run_attention(const Attention& call, const AttentionKernels& kernels, Pool& pool) {
  const int64_t threads = std::max<int64_t>(pool.threads(), 1);
  const std::vector<Part> parts = make_parts(call, threads);
  const bool split = int64_t(parts.size()) < 2 * threads && threads > 1;
  std::vector<std::unique_ptr<Group>> groups;
  std::vector<Item> items;
  int64_t partial = 0, cost = 0;
  for (const Part& part : parts) {
    cost += cost_of(call, part);
    const int64_t spans = split ? spans_of(part) : 1;
    if (spans == 1) {
      items.push_back({part, nullptr});
      continue;
    }
    groups.push_back(std::make_unique<Group>(part, spans));
    partial += spans * part.rows * (call.head_dim + 2);
  }
  const Floats memory = partial == 0 ? nullptr : make_floats(partial);
  float* at = memory.get();
  for (const std::unique_ptr<Group>& group : groups) {
    group->whole.partial = at;
    Part part = group->whole;
    for (int64_t begin = part.begin_block; begin < group->whole.end_block; begin = part.end_block) {
      part.begin_block = begin, part.end_block = std::min((begin / SPAN_BLOCKS + 1) * SPAN_BLOCKS, group->whole.end_block);
      part.partial = at;
      at += part.rows * (call.head_dim + 2);
      items.push_back({part, group.get()});
    }
  }
  std::atomic<size_t> next{0};
  const int64_t workers = std::min({threads, int64_t(items.size()), 1 + cost / COST_OF_A_THREAD});
  parallel_for(pool, workers, [&](int64_t) {
    float* const scratch = scratch_of(kernels.scratch_floats(call.head_dim));
    for (size_t i = next.fetch_add(1); i < items.size(); i = next.fetch_add(1)) {
      kernels.attend(call, items[i].part, scratch);
      Group* const group = items[i].group;
      if (group != nullptr && group->left.fetch_sub(1) == 1) kernels.merge(call, group->whole, group->count);
    }
  });
}

}  // namespace jaxkv
