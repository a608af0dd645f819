#include <cstddef>
#include <string>

#include "attention_parts.h"
#include "ffi.h"

namespace jaxkv {
namespace {

namespace ffi = xla::ffi;

// Shapes and dtypes have been checked by the public operation; what is checked here is that the two agree on the order of the operands.
ffi::Error attention(ffi::ThreadPool threads, ffi::RemainingArgs arguments, ffi::Result<ffi::AnyBuffer> out,
                     ffi::Result<ffi::BufferR3<ffi::F32>> lse, int32_t target, float scale, float soft_cap, int64_t window, bool sinks,
                     bool scales) {
  Target chosen;
  if (!resolve_target(target, &chosen)) return ffi::Error::InvalidArgument("no target of number " + std::to_string(target) + " here");
  const size_t count = 6 + (sinks ? 1 : 0) + (scales ? 2 : 0);
  if (arguments.size() != count) return ffi::Error::InvalidArgument("expected " + std::to_string(count) + " operands");
  const auto any = [&](size_t i) { return arguments.get<ffi::AnyBuffer>(i).value(); };
  const ffi::AnyBuffer q = any(0), k = any(1), v = any(2), tables = any(3);
  Attention call{};
  if (!dtype_of(q.element_type(), &call.q_dtype) || !dtype_of(k.element_type(), &call.page_dtype) || call.q_dtype > Dtype::float16 ||
      v.element_type() != k.element_type() || out->element_type() != q.element_type())
    return ffi::Error::InvalidArgument("a dtype of q or of the pages is not one that attention takes");
  if (q.dimensions().size() != 4 || k.dimensions().size() != 4 || tables.dimensions().size() != 2)
    return ffi::Error::InvalidArgument("q and the pages must have four axes, block tables two");
  for (size_t i = 3; i < count; ++i)
    if (any(i).element_type() != (i < 6 ? ffi::S32 : ffi::F32))
      return ffi::Error::InvalidArgument("operand " + std::to_string(i) + " must be " + (i < 6 ? "int32" : "float32"));
  const auto q_shape = q.dimensions(), page_shape = k.dimensions();
  call.batch = q_shape[0], call.queries = q_shape[1], call.head_dim = q_shape[3];
  call.num_pages = page_shape[0], call.kv_heads = page_shape[1], call.page_size = page_shape[2];
  call.q_per_kv = q_shape[2] / call.kv_heads, call.pages_per_seq = tables.dimensions()[1];
  if (call.q_per_kv * call.kv_heads != q_shape[2] || page_shape[3] != call.head_dim)
    return ffi::Error::InvalidArgument("heads or head_dim of q and of the pages disagree");
  const auto ints = [&](size_t i) { return static_cast<const int32_t*>(any(i).untyped_data()); };
  const auto floats = [&](size_t i) { return static_cast<const float*>(any(i).untyped_data()); };
  call.q = q.untyped_data(), call.k_pages = k.untyped_data(), call.v_pages = v.untyped_data();
  call.tables = ints(3), call.lengths = ints(4), call.num_queries = ints(5);
  size_t at = 6;
  if (sinks) call.sinks = floats(at++);
  if (scales) call.k_scales = floats(at++), call.v_scales = floats(at++);
  call.out = out->untyped_data(), call.lse = lse->typed_data();
  call.scale = scale, call.soft_cap = soft_cap, call.window = window;
  XlaPool pool(threads);
  run_attention(call, attention_kernels(chosen), pool);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxkv

JAXKV_HANDLER(jaxkv_attention, jaxkv::attention,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .RemainingArgs()  // q, k_pages, v_pages, block_tables, lengths, num_queries, then sinks, then k_scales and v_scales
                  .Ret<xla::ffi::AnyBuffer>()                     // out
                  .Ret<xla::ffi::BufferR3<xla::ffi::F32>>()       // lse
                  .Attr<int32_t>("target")
                  .Attr<float>("scale")
                  .Attr<float>("soft_cap")
                  .Attr<int64_t>("window")
                  .Attr<bool>("sinks")
                  .Attr<bool>("scales"))
