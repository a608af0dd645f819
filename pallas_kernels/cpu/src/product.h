// Products x[rows, width] . weight[outputs, width]^T, between their handler (or another caller) and their kernels.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "target.h"

namespace jaxkv {

struct Product {
  Dtype dtype;  // of all three arrays
  int64_t rows, width, outputs;
  const void* x;
  const void* weight;
  void* y;  // [rows, outputs]
};

struct ProductKernels {
  // Columns [begin, end) of y for all rows.
  void (*columns)(const Product& product, int64_t begin, int64_t end);
};

JAXKV_TABLE(ProductKernels, product_kernels)

}  // namespace jaxkv
