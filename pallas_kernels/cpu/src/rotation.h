// Queries, keys and values as they come out of one product, split, and the queries and keys rotated; between a handler and kernels.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "target.h"

namespace jaxkv {

struct Rotation {
  Dtype dtype;         // of x, q, k and v
  const void* x;       // [tokens, kv_heads, q_per_kv + 2, head_dim]: of each kv head its query heads, its key, its value
  const float* cos;    // [tokens, half]
  const float* sin;
  void *q, *k, *v;     // [tokens, kv_heads * q_per_kv, head_dim] and twice [tokens, kv_heads, head_dim]
  int64_t kv_heads, q_per_kv, head_dim, half;
};

struct RotationKernels {
  void (*tokens)(const Rotation& call, int64_t begin, int64_t end);
};

JAXKV_TABLE(RotationKernels, rotation_kernels)

}  // namespace jaxkv
