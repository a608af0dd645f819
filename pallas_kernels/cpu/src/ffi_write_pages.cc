#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "ffi.h"

namespace jaxkv {
namespace {

namespace ffi = xla::ffi;

constexpr size_t BYTES_OF_A_TASK = 1 << 16;  // what is worth waking a thread for

struct Write {
  char* pool;
  const char* values;
  size_t bytes;  // of one slot
};

// Each pool is the result's memory, too: XLA has seen to it that they are one, with a copy where somebody else needs the old one.
ffi::Error write_pages(ffi::ThreadPool threads, ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  const size_t pools = results.size();
  if (pools == 0 || arguments.size() != 2 * pools + 1)
    return ffi::Error::InvalidArgument("expected the pools, their new values, and slots");
  const auto argument = [&](size_t i) { return arguments.get<ffi::AnyBuffer>(i).value(); };
  const ffi::AnyBuffer slots = argument(2 * pools);
  if (slots.element_type() != ffi::S32 || slots.dimensions().size() != 1) return ffi::Error::InvalidArgument("slots must be i32[vectors]");
  const int64_t vectors = slots.dimensions()[0];
  int64_t slots_of_a_pool = 1;
  for (size_t i = 0; i < 3; ++i) slots_of_a_pool *= argument(0).dimensions()[i];
  Write writes[4];
  size_t bytes = 0;
  if (pools > 4) return ffi::Error::InvalidArgument("at most four pools");
  for (size_t i = 0; i < pools; ++i) {
    const ffi::AnyBuffer pool = argument(i), values = argument(pools + i);
    auto result = results.get<ffi::AnyBuffer>(i).value();
    if (result->untyped_data() != pool.untyped_data()) return ffi::Error::Internal("a pool and its result are not one memory");
    writes[i] = {static_cast<char*>(result->untyped_data()), static_cast<const char*>(values.untyped_data()),
                 pool.size_bytes() / size_t(slots_of_a_pool)};
    if (values.element_type() != pool.element_type() || values.size_bytes() != size_t(vectors) * writes[i].bytes)
      return ffi::Error::InvalidArgument("new values must be one vector of the pool's dtype for each slot");
    bytes += writes[i].bytes;
  }
  const int32_t* const where = static_cast<const int32_t*>(slots.untyped_data());
  const int64_t step = std::max<int64_t>(1, int64_t(BYTES_OF_A_TASK / std::max<size_t>(bytes, 1)));
  XlaPool pool(threads);
  parallel_for(pool, (vectors + step - 1) / step, [&](int64_t task) {
    for (int64_t i = task * step; i < std::min((task + 1) * step, vectors); ++i) {
      if (where[i] < 0 || where[i] >= slots_of_a_pool) continue;
      for (size_t j = 0; j < pools; ++j)
        std::memcpy(writes[j].pool + size_t(where[i]) * writes[j].bytes, writes[j].values + size_t(i) * writes[j].bytes, writes[j].bytes);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxkv

JAXKV_HANDLER(jaxkv_write_pages, jaxkv::write_pages,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .RemainingArgs()   // pools [num_pages, kv_heads, page_size, ...], their new values [vectors, ...], slots i32[vectors]
                  .RemainingRets())  // the pools
