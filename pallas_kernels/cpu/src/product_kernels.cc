#include "product.h"
#include "simd.h"

namespace jaxkv {
namespace JAXKV_TARGET {
namespace {

template <typename T>
void columns_of(const Product& p, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(p.x);
  const T* weight = static_cast<const T*>(p.weight);
  T* y = static_cast<T*>(p.y);
  const int64_t whole = p.width / LANES * LANES;
  for (int64_t n = begin; n < end; ++n) {
    for (int64_t m = 0; m < p.rows; ++m) {
      F total = {};
      const T* a = x + m * p.width;
      const T* b = weight + n * p.width;
      for (int64_t k = 0; k < whole; k += LANES) total = fma(load(a + k), load(b + k), total);
      if (whole < p.width) {
        total = fma(load_tail(a + whole, p.width - whole), load_tail(b + whole, p.width - whole), total);
      }
      store_one(y + m * p.outputs + n, sum(total));
    }
  }
}

void columns(const Product& p, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case Dtype::float32: return columns_of<float>(p, begin, end);
    case Dtype::bfloat16: return columns_of<bf16>(p, begin, end);
    case Dtype::float16: return columns_of<f16>(p, begin, end);
    default: return;
  }
}

}  // namespace

const ProductKernels& product_kernels() {
  static constexpr ProductKernels table = {columns};
  return table;
}

}  // namespace JAXKV_TARGET
}  // namespace jaxkv
