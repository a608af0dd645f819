// What every handler shares: XLA's pool as ours, its dtypes as ours.
#pragma once

#include <functional>
#include <utility>

#include "dtype.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace jaxkv {

class XlaPool final : public Pool {
 public:
  explicit XlaPool(xla::ffi::ThreadPool pool) : pool_(pool) {}
  int64_t threads() override { return pool_.num_threads(); }
  void schedule(std::function<void()> function) override { pool_.Schedule(std::move(function)); }

 private:
  xla::ffi::ThreadPool pool_;
};

// False for a dtype that no kernel knows.
inline bool dtype_of(xla::ffi::DataType type, Dtype* out) {
  switch (type) {
    case xla::ffi::F32: *out = Dtype::float32; return true;
    case xla::ffi::BF16: *out = Dtype::bfloat16; return true;
    case xla::ffi::F16: *out = Dtype::float16; return true;
    case xla::ffi::S8: *out = Dtype::int8; return true;
    case xla::ffi::F8E4M3FN: *out = Dtype::float8_e4m3fn; return true;
    case xla::ffi::F8E5M2: *out = Dtype::float8_e5m2; return true;
    default: return false;
  }
}

}  // namespace jaxkv

#define JAXKV_EXPORT __attribute__((visibility("default")))

// Defines and exports the handler `name`, which library.py finds; what follows are the function and xla::ffi::Ffi::Bind()....
#define JAXKV_HANDLER(name, function, ...)                                    \
  extern "C" JAXKV_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame* call_frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function, __VA_ARGS__);
