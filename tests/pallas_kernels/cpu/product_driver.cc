// Products of random shapes with threads of its own, for sanitizers: `product_driver CASES`. Every array has its exact size, so that a read
// beyond it is seen; several callers share one pool, one of whose threads is late; and a pool that never runs what it is given must not
// stop a caller. Exits with 1 and a line for a result that is wrong or depends on the rows beside it.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#include "own_pool.h"
#include "product.h"

namespace {

using jaxkv::Dtype;
using jaxkv::Product;
using jaxkv::Target;

// Schedules nothing before it is destroyed.
class LatePool final : public jaxkv::Pool {
 public:
  ~LatePool() override {
    for (const auto& function : waiting_) function();
  }
  int64_t threads() override { return 4; }
  void schedule(std::function<void()> function) override { waiting_.push_back(std::move(function)); }

 private:
  std::vector<std::function<void()>> waiting_;
};

size_t size_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

// Small integers over 8, which all three dtypes hold exactly, and products of which float32 adds up exactly.
void fill(std::mt19937& random, Dtype dtype, std::unique_ptr<char[]>& bytes, std::vector<double>& values, int64_t count) {
  bytes.reset(new char[size_t(count) * size_of(dtype)]);
  values.resize(size_t(count));
  for (int64_t i = 0; i < count; ++i) {
    const int number = int(random() % 15) - 7;
    const float value = float(number) / 8;
    values[size_t(i)] = value;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (dtype == Dtype::bfloat16) bits >>= 16;
    if (dtype == Dtype::float16 && value != 0) bits = (bits >> 16 & 0x8000) | (((bits & 0x7fffffff) - (112u << 23)) >> 13);
    std::memcpy(bytes.get() + size_t(i) * size_of(dtype), &bits, size_of(dtype));
  }
}

double value_of(Dtype dtype, const char* bytes) {
  uint32_t bits = 0;
  std::memcpy(&bits, bytes, size_of(dtype));
  if (dtype == Dtype::float16) {
    const double magnitude = (bits & 0x7c00) == 0 ? std::ldexp(double(bits & 0x3ff), -24)
                                                  : std::ldexp(double(bits & 0x3ff) + 1024, int(bits >> 10 & 31) - 25);
    return bits & 0x8000 ? -magnitude : magnitude;
  }
  if (dtype == Dtype::bfloat16) bits <<= 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

bool check(std::mt19937& random, jaxkv::Pool& pool) {
  const Dtype dtype = Dtype(random() % 3);
  Target target = Target(random() % jaxkv::TARGETS);
  while (!jaxkv::has(target)) target = Target(int32_t(target) - 1);
  const int64_t rows = 1 + int64_t(random() % (random() % 8 == 0 ? 70 : 20)), width = 1 + int64_t(random() % 150);
  const int64_t outputs = 1 + int64_t(random() % 90);
  std::unique_ptr<char[]> x, weight;
  std::vector<double> x_values, weight_values;
  fill(random, dtype, x, x_values, rows * width);
  fill(random, dtype, weight, weight_values, outputs * width);
  const size_t size = size_of(dtype);
  std::unique_ptr<char[]> y(new char[size_t(rows * outputs) * size]), alone(new char[size_t(outputs) * size]);
  std::unique_ptr<unsigned char[]> live(new unsigned char[size_t(rows)]);
  const unsigned dead = random() % 3;  // none, some, most
  for (int64_t m = 0; m < rows; ++m) live[size_t(m)] = dead == 0 || random() % (2 * dead) == 0;
  jaxkv::run(Product{dtype, rows, width, outputs, x.get(), weight.get(), y.get(), live.get()}, target, pool);
  const int64_t row = int64_t(random() % uint32_t(rows));
  std::unique_ptr<char[]> x_row(new char[size_t(width) * size]);
  std::memcpy(x_row.get(), x.get() + size_t(row * width) * size, size_t(width) * size);
  jaxkv::run(Product{dtype, 1, width, outputs, x_row.get(), weight.get(), alone.get(), &live[size_t(row)]}, target, pool);
  bool right = std::memcmp(alone.get(), y.get() + size_t(row * outputs) * size, size_t(outputs) * size) == 0;
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < outputs; ++n) {
      double want = 0;
      for (int64_t k = 0; live[size_t(m)] && k < width; ++k) want += x_values[size_t(m * width + k)] * weight_values[size_t(n * width + k)];
      const double unit = dtype == Dtype::float32 ? 0 : dtype == Dtype::bfloat16 ? 1.0 / 256 : 1.0 / 2048;
      const double got = value_of(dtype, y.get() + size_t(m * outputs + n) * size);
      right = right && std::abs(got - want) <= unit * std::abs(want);
    }
  }
  if (!right) {
    std::printf("wrong: dtype %d, target %s, [%ld, %ld] x [%ld, %ld]\n", int(dtype), jaxkv::name_of(target), long(rows), long(width),
                long(outputs), long(width));
  }
  return right;
}

}  // namespace

int main(int, char** arguments) {
  const int cases = std::atoi(arguments[1]);
  std::atomic<bool> right{true};
  {
    OwnPool pool(2);
    std::vector<std::thread> callers;
    for (unsigned caller = 0; caller < 3; ++caller) {
      callers.emplace_back([&, caller] {
        std::mt19937 random(caller);
        for (int i = 0; i < cases; ++i)
          if (!check(random, pool)) right = false;
      });
    }
    for (std::thread& caller : callers) caller.join();
  }
  {
    LatePool pool;
    std::mt19937 random(99);
    for (int i = 0; i < cases / 10; ++i)
      if (!check(random, pool)) right = false;
  }
  return right ? 0 : 1;
}
