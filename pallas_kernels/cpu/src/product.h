// Products x[rows, width] . weight[outputs, width]^T: what their handler, or another caller, asks for, and what their kernels do.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "target.h"
#include "threads.h"

namespace jaxkv {

struct Product {
  Dtype dtype;  // of all three arrays: float32, bfloat16 or float16
  int64_t rows, width, outputs;
  const void* x;
  const void* weight;
  void* y;  // [rows, outputs]
  // One byte a row, or null. Where it is zero, the row is not computed, and its results are zeros.
  const unsigned char* live = nullptr;
};

// Runs it. Every element of y is summed in one order, which the target, the dtype and the width fix: the bits of a row depend neither on
// how many rows there are nor on threads.
void run(const Product& product, Target target, Pool& pool);

// A rectangle of y: rows of x as `prepare` has left them, and columns.
struct Part {
  int64_t row_begin, row_end, begin, end;
  const void* x;  // all rows as `prepare` has left them; null where x is taken as it is
  void* scratch;  // ProductKernels::scratch_bytes of this part's rows
};

// What kernels see: the rows that are computed, as many as `rows` says.
struct Rows : Product {
  const int64_t* numbers = nullptr;  // of each of them among all; null where all are computed

  explicit Rows(const Product& product) : Product(product) {}
};

struct ProductKernels {
  // Bytes of a row of x as `prepare` leaves it; 0 where kernels take x as it is.
  int64_t (*row_bytes)(const Rows& rows);
  // Rows [begin, end) of x into `to`, which holds all rows.
  void (*prepare)(const Rows& rows, int64_t begin, int64_t end, void* to);
  // Scratch that a thread needs for a part of so many rows.
  int64_t (*scratch_bytes)(const Rows& rows, int64_t count);
  void (*part)(const Rows& rows, const Part& part);
};

JAXKV_TABLE_WITH_BF16(ProductKernels, product_kernels)

}  // namespace jaxkv
