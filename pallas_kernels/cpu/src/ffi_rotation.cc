#include <algorithm>
#include <string>

#include "ffi.h"
#include "rotation.h"

namespace jaxkv {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t NUMBERS_OF_A_TASK = 1 << 15;  // what is worth waking a thread for

ffi::Error rotation(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::BufferR2<ffi::F32> cos, ffi::BufferR2<ffi::F32> sin,
                    ffi::Result<ffi::AnyBuffer> q, ffi::Result<ffi::AnyBuffer> k, ffi::Result<ffi::AnyBuffer> v, int32_t target) {
  Target chosen;
  if (!resolve_target(target, &chosen)) return ffi::Error::InvalidArgument("no target of number " + std::to_string(target) + " here");
  Rotation call{};
  if (!dtype_of(x.element_type(), &call.dtype) || call.dtype > Dtype::float16)
    return ffi::Error::InvalidArgument("x must be float32, bfloat16 or float16");
  const auto shape = x.dimensions();
  if (shape.size() != 4 || shape[2] < 2 || cos.dimensions()[0] != shape[0] || sin.dimensions()[0] != shape[0] || sin.dimensions()[1] != cos.dimensions()[1] ||
      2 * cos.dimensions()[1] > shape[3])
    return ffi::Error::InvalidArgument("x must be [tokens, kv_heads, q_per_kv + 2, head_dim], cos and sin [tokens, half]");
  const int64_t tokens = shape[0];
  call.kv_heads = shape[1], call.q_per_kv = shape[2] - 2, call.head_dim = shape[3], call.half = cos.dimensions()[1];
  call.x = x.untyped_data(), call.cos = cos.typed_data(), call.sin = sin.typed_data();
  call.q = q->untyped_data(), call.k = k->untyped_data(), call.v = v->untyped_data();
  const int64_t step = std::max<int64_t>(1, NUMBERS_OF_A_TASK / std::max<int64_t>(1, shape[1] * shape[2] * shape[3]));
  XlaPool pool(threads);
  parallel_for(pool, (tokens + step - 1) / step,
               [&](int64_t i) { rotation_kernels(chosen).tokens(call, i * step, std::min((i + 1) * step, tokens)); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxkv

JAXKV_HANDLER(jaxkv_rotation, jaxkv::rotation,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::AnyBuffer>()                // x
                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()  // cos
                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()  // sin
                  .Ret<xla::ffi::AnyBuffer>()                // q
                  .Ret<xla::ffi::AnyBuffer>()                // k
                  .Ret<xla::ffi::AnyBuffer>()                // v
                  .Attr<int32_t>("target"))
