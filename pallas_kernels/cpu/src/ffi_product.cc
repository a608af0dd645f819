#include <string>

#include "ffi.h"
#include "product.h"

namespace jaxkv {
namespace {

namespace ffi = xla::ffi;

ffi::Error product_of(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer weight, const unsigned char* live,
                      ffi::Result<ffi::AnyBuffer> y, int32_t target) {
  Target chosen;
  if (!resolve_target(target, &chosen)) return ffi::Error::InvalidArgument("no target of number " + std::to_string(target) + " here");
  Product p;
  if (!dtype_of(x.element_type(), &p.dtype) || p.dtype > Dtype::float16 || weight.element_type() != x.element_type() ||
      y->element_type() != x.element_type()) {
    return ffi::Error::InvalidArgument("x, weight and y must have one dtype of float32, bfloat16 and float16");
  }
  const auto x_shape = x.dimensions(), weight_shape = weight.dimensions();
  if (x_shape.size() != 2 || weight_shape.size() < 1 || weight_shape.back() != x_shape[1]) {
    return ffi::Error::InvalidArgument("x must be [rows, in] and weight [*out, in]");
  }
  p.rows = x_shape[0], p.width = x_shape[1];
  p.outputs = 1;
  for (size_t i = 0; i + 1 < weight_shape.size(); ++i) p.outputs *= weight_shape[i];
  if (int64_t(y->element_count()) != p.rows * p.outputs) return ffi::Error::InvalidArgument("y must be [rows, *out]");
  p.x = x.untyped_data(), p.weight = weight.untyped_data(), p.y = y->untyped_data();
  p.live = live;
  XlaPool pool(threads);
  run(p, chosen, pool);
  return ffi::Error::Success();
}

ffi::Error product(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> y, int32_t target) {
  return product_of(threads, x, weight, nullptr, y, target);
}

ffi::Error product_of_live(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::BufferR1<ffi::PRED> live,
                           ffi::Result<ffi::AnyBuffer> y, int32_t target) {
  if (x.dimensions().size() != 2 || live.dimensions()[0] != x.dimensions()[0]) {
    return ffi::Error::InvalidArgument("live must be [rows] and x [rows, in]");
  }
  return product_of(threads, x, weight, static_cast<const unsigned char*>(live.untyped_data()), y, target);
}

}  // namespace
}  // namespace jaxkv

JAXKV_HANDLER(jaxkv_product, jaxkv::product,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::AnyBuffer>()  // x
                  .Arg<xla::ffi::AnyBuffer>()  // weight
                  .Ret<xla::ffi::AnyBuffer>()  // y
                  .Attr<int32_t>("target"))

JAXKV_HANDLER(jaxkv_product_of_live, jaxkv::product_of_live,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::AnyBuffer>()                  // x
                  .Arg<xla::ffi::AnyBuffer>()                  // weight
                  .Arg<xla::ffi::BufferR1<xla::ffi::PRED>>()   // live
                  .Ret<xla::ffi::AnyBuffer>()                  // y
                  .Attr<int32_t>("target"))
