// How a product is cut into tasks.
#include "product.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace jaxkv {
namespace {

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
typedef std::unique_ptr<void, Free> Memory;

constexpr int64_t LINE = 64;

int64_t up_to(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

Memory allocate(int64_t bytes) {
  if (bytes == 0) return nullptr;
  Memory memory(std::aligned_alloc(LINE, size_t(up_to(bytes, LINE))));
  if (memory == nullptr) throw std::bad_alloc();  // nobody catches it: the process ends, as it does where XLA finds no memory
  return memory;
}

// A thread's scratch, kept for its next task.
void* scratch_of_this_thread(int64_t bytes) {
  thread_local Memory memory;
  thread_local int64_t size = 0;
  if (size < bytes) {
    memory = allocate(bytes);
    size = bytes;
  }
  return memory.get();
}

constexpr double SERIAL = 100e3;  // multiplications that cost less than waking a thread does
constexpr int64_t TASKS_A_THREAD = 4, COLUMNS = 16;  // a line of float32, and a multiple of the kernels' tiles
constexpr int64_t ROW_BLOCK_BYTES = 768 << 10;       // of x, to stay in the second cache while a task's weight passes

void run_rows(const Rows& p, const ProductKernels& kernels, Pool& pool) {
  const int64_t row_bytes = kernels.row_bytes(p);
  const Memory prepared = allocate(row_bytes * p.rows);
  const int64_t threads = std::max<int64_t>(1, double(p.rows) * double(p.outputs) * double(p.width) < SERIAL ? 1 : pool.threads());
  if (row_bytes > 0) {
    const int64_t chunk = std::max<int64_t>(1 + (64 << 10) / row_bytes, (p.rows + threads - 1) / threads);
    parallel_for(pool, (p.rows + chunk - 1) / chunk, [&](int64_t i) {
      kernels.prepare(p, i * chunk, std::min(p.rows, (i + 1) * chunk), prepared.get());
    });
  }
  const int64_t line = std::max<int64_t>(1, p.width * 4);
  const int64_t row_blocks = std::max<int64_t>(1, (p.rows * line + ROW_BLOCK_BYTES - 1) / ROW_BLOCK_BYTES);
  const int64_t block = (p.rows + row_blocks - 1) / row_blocks;
  const int64_t wanted = threads == 1 ? 1 : (threads * TASKS_A_THREAD + row_blocks - 1) / row_blocks;
  const int64_t columns = std::max(COLUMNS, up_to((p.outputs + wanted - 1) / wanted, COLUMNS));
  const int64_t strips = (p.outputs + columns - 1) / columns;
  const int64_t scratch = kernels.scratch_bytes(p, block);
  const auto task = [&](int64_t i) {
    Part part;
    part.row_begin = i / strips * block, part.row_end = std::min(p.rows, part.row_begin + block);
    part.begin = i % strips * columns, part.end = std::min(p.outputs, part.begin + columns);
    part.x = prepared.get();
    part.scratch = scratch_of_this_thread(scratch);
    if (part.row_begin < part.row_end) kernels.part(p, part);
  };
  parallel_for(pool, row_blocks * strips, task);
}

}  // namespace

void run(const Product& product, Target target, Pool& pool) {
  if (product.outputs == 0) return;
  Rows rows(product);
  std::vector<int64_t> numbers;
  if (product.live != nullptr) {
    const size_t bytes = size_t(product.outputs) * (product.dtype == Dtype::float32 ? 4 : 2);
    for (int64_t r = 0; r < product.rows; ++r) {
      if (product.live[r]) numbers.push_back(r);
      else std::memset(static_cast<char*>(product.y) + size_t(r) * bytes, 0, bytes);
    }
    rows.rows = int64_t(numbers.size());
    if (rows.rows < product.rows) rows.numbers = numbers.data();
  }
  if (rows.rows > 0) run_rows(rows, product_kernels(target), pool);
}

}  // namespace jaxkv
