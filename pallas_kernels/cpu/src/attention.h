// One call of paged attention and its division into parts, as plain data that all targets share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.h"
#include "target.h"

namespace jaxkv {

constexpr int BLOCK = 64;           // keys that share one step of the online softmax: cut at multiples of it in a row's own positions
constexpr int SPAN_BLOCKS = 16;     // blocks that make one partial result, which is merged with those before it in their order
constexpr int PART_ROWS = 64;       // most query rows of a part: they share what has been widened of a block
constexpr float LOWEST = -2.4e38f;  // the greatest score where there is none: finite, so that a difference of two is no NaN

// Operands and results. A query row of a kv head is a query and a query head of its group: query * q_per_kv + head in the group.
struct Attention {
  const void* q;               // [batch, queries, kv_heads * q_per_kv, head_dim]
  const void* k_pages;         // [num_pages, kv_heads, page_size, head_dim]
  const void* v_pages;
  const int32_t* tables;       // [batch, pages_per_seq]
  const int32_t* lengths;      // [batch]
  const int32_t* num_queries;  // [batch]
  const float* sinks;          // [heads], or null
  const float* k_scales;       // [num_pages, kv_heads, page_size], or null
  const float* v_scales;
  void* out;                   // like q
  float* lse;                  // [batch, queries, heads]
  Dtype q_dtype, page_dtype;
  int64_t batch, queries, kv_heads, q_per_kv, head_dim, num_pages, page_size, pages_per_seq;
  int64_t window;              // positions back that a query sees, itself included; 0 for all of them
  float scale, soft_cap;       // soft_cap is 0 for none
};

// Live query rows of one kv head of one row of the batch, over some blocks of its keys.
struct Part {
  int64_t row, kv_head;
  int64_t first_row, rows;         // of the kv head's query rows
  int64_t first;                   // position of query 0 of the row; below 0 where there are more queries than tokens
  int64_t begin_block, end_block;
  float* partial;                  // where to leave the partial result; null where these are all blocks: then the result is written
};

// A partial result is, of each query row, the greatest score, the sum of exponentials, and head_dim values weighted by these.
struct AttentionKernels {
  int64_t (*scratch_floats)(int64_t head_dim);
  void (*attend)(const Attention& call, const Part& part, float* scratch);
  // Merges `count` partial results that lie one after the other, in their order, and writes the result of the part's query rows.
  void (*merge)(const Attention& call, const Part& part, int64_t count);
  // The exp and tanh of one number that the kernels compute with, for those who measure them.
  float (*exp)(float x);
  float (*tanh)(float x);
};

JAXKV_TABLE(AttentionKernels, attention_kernels)

}  // namespace jaxkv
