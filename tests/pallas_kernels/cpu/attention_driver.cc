// Paged attention of the native kernels without jax: random calls on a pool of threads of its own, for every target that the processor has,
// against sums in double. Everything lies in memory of exactly its size, and what no query sees holds NaN, so that a sanitizer and the
// comparison find what is read or written out of place. test_attention_driver.py compiles it with sanitizers and runs it.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "attention_parts.h"
#include "own_pool.h"

using namespace jaxkv;

namespace {

constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

uint32_t bits(float x) {
  uint32_t out;
  std::memcpy(&out, &x, 4);
  return out;
}

struct Case {
  Attention call{};
  std::vector<float> q, k, v, out, lse, sinks, k_scales, v_scales;
  std::vector<uint16_t> q16, k16, v16, out16;
  std::vector<int8_t> k8, v8;
  std::vector<int32_t> tables, lengths, num_queries;

  float key(size_t at, const std::vector<float>& wide, const std::vector<float>& scales) const {
    return call.page_dtype == Dtype::int8 ? wide[at] * scales[at / size_t(call.head_dim)] : wide[at];
  }
};

// Numbers of eight bits, so that each dtype holds them exactly.
void fill(std::vector<float>* x, std::mt19937& random) {
  for (float& number : *x) number = float(int(random() % 255) - 127) / 64;
}

std::vector<uint16_t> upper_halves(const std::vector<float>& x) {
  std::vector<uint16_t> out;
  for (float number : x) out.push_back(uint16_t(bits(number) >> 16));
  return out;
}

std::unique_ptr<Case> make_case(std::mt19937& random) {
  auto made = std::make_unique<Case>();
  Case& c = *made;
  Attention& a = c.call;
  const auto one_of = [&](std::initializer_list<int64_t> choices) { return choices.begin()[random() % choices.size()]; };
  a.kv_heads = one_of({1, 2, 3}), a.q_per_kv = one_of({1, 1, 2, 3, 5, 8, 20}), a.head_dim = one_of({1, 3, 8, 16, 17, 64, 80});
  a.page_size = one_of({1, 3, 16, 64, 100}), a.batch = one_of({1, 1, 2, 5}), a.queries = one_of({1, 1, 2, 7, 40});
  a.window = one_of({0, 0, 1, 9, 70, 1500}), a.scale = 0.25f, a.soft_cap = random() % 3 == 0 ? 2.0f : 0.0f;
  a.page_dtype = random() % 3 == 0 ? Dtype::int8 : random() % 2 ? Dtype::float32 : Dtype::bfloat16;
  a.q_dtype = a.page_dtype == Dtype::int8 ? Dtype::float32 : a.page_dtype;
  int64_t most = 1, page = 1;
  for (int64_t row = 0; row < a.batch; ++row) {
    c.lengths.push_back(int32_t(one_of({0, 1, 15, 63, 64, 65, 200, 1030, 2100})));
    c.num_queries.push_back(int32_t(random() % uint64_t(a.queries + 2)));
    most = std::max<int64_t>(most, c.lengths.back());
  }
  a.pages_per_seq = (most + a.page_size - 1) / a.page_size;
  for (int64_t row = 0; row < a.batch; ++row)
    for (int64_t i = 0; i < a.pages_per_seq; ++i)
      c.tables.push_back(i * a.page_size < c.lengths[size_t(row)] ? int32_t(page++) : int32_t(random()));
  a.num_pages = page;
  const size_t slots = size_t(page * a.kv_heads * a.page_size), heads = size_t(a.kv_heads * a.q_per_kv);
  c.q.resize(size_t(a.batch * a.queries) * heads * size_t(a.head_dim)), c.k.resize(slots * size_t(a.head_dim)), c.v.resize(c.k.size());
  c.lse.assign(c.q.size() / size_t(a.head_dim), NOT_A_NUMBER), c.out.assign(c.q.size(), NOT_A_NUMBER), c.out16.assign(c.q.size(), 1);
  fill(&c.q, random), fill(&c.k, random), fill(&c.v, random);
  if (random() % 3 == 0) c.sinks.resize(heads), fill(&c.sinks, random);
  c.k_scales.assign(slots, 0.5f), c.v_scales.assign(slots, 0.25f);
  for (size_t slot = 0; slot < slots; ++slot) {  // a row's own tokens live in its own pages: the others are nobody's
    const int64_t of_page = int64_t(slot) / (a.kv_heads * a.page_size), offset = int64_t(slot) % a.page_size;
    bool live = false;
    for (int64_t row = 0; row < a.batch; ++row)
      for (int64_t i = 0; i * a.page_size + offset < c.lengths[size_t(row)] && !live; ++i)
        live = c.tables[size_t(row * a.pages_per_seq + i)] == of_page;
    if (live) continue;
    c.k_scales[slot] = c.v_scales[slot] = NOT_A_NUMBER;
    for (int64_t d = 0; d < a.head_dim; ++d) c.k[slot * size_t(a.head_dim) + size_t(d)] = c.v[slot * size_t(a.head_dim) + size_t(d)] = NOT_A_NUMBER;
  }
  c.q16 = upper_halves(c.q), c.k16 = upper_halves(c.k), c.v16 = upper_halves(c.v);
  for (size_t i = 0; i < c.k.size(); ++i) {
    c.k8.push_back(int8_t(std::isnan(c.k[i]) ? 0 : c.k[i] * 16)), c.v8.push_back(int8_t(std::isnan(c.v[i]) ? 0 : c.v[i] * 16));
    if (a.page_dtype == Dtype::int8) c.k[i] = c.k8[i], c.v[i] = c.v8[i];
  }
  const bool whole = a.page_dtype == Dtype::float32, half = a.page_dtype == Dtype::bfloat16;
  a.q = a.q_dtype == Dtype::float32 ? static_cast<void*>(c.q.data()) : c.q16.data();
  a.out = a.q_dtype == Dtype::float32 ? static_cast<void*>(c.out.data()) : c.out16.data();
  a.k_pages = whole ? static_cast<void*>(c.k.data()) : half ? static_cast<void*>(c.k16.data()) : c.k8.data();
  a.v_pages = whole ? static_cast<void*>(c.v.data()) : half ? static_cast<void*>(c.v16.data()) : c.v8.data();
  if (a.page_dtype == Dtype::int8) a.k_scales = c.k_scales.data(), a.v_scales = c.v_scales.data();
  if (!c.sinks.empty()) a.sinks = c.sinks.data();
  a.tables = c.tables.data(), a.lengths = c.lengths.data(), a.num_queries = c.num_queries.data(), a.lse = c.lse.data();
  return made;
}

double output(const Case& c, size_t at) {
  if (c.call.q_dtype == Dtype::float32) return c.out[at];
  const uint32_t wide = uint32_t(c.out16[at]) << 16;
  float out;
  std::memcpy(&out, &wide, 4);
  return out;
}

// The greatest difference of one query of one head, from the definition; infinite where a dead one is not 0 and -inf.
double error_of(const Case& c, int64_t row, int64_t query, int64_t head) {
  const Attention& a = c.call;
  const size_t D = size_t(a.head_dim), at = size_t((row * a.queries + query) * a.kv_heads * a.q_per_kv + head);
  const int64_t own = c.lengths[size_t(row)] - c.num_queries[size_t(row)] + query;
  double worst = 0;
  if (query >= c.num_queries[size_t(row)] || own < 0) {
    for (size_t d = 0; d < D; ++d) worst = std::max(worst, std::abs(output(c, at * D + d)));
    return worst == 0 && c.lse[at] == -INFINITY ? 0 : INFINITY;
  }
  std::vector<double> scores, sum(D);
  std::vector<size_t> slots;
  double top = c.sinks.empty() ? -INFINITY : c.sinks[size_t(head)];
  for (int64_t position = a.window == 0 ? 0 : std::max<int64_t>(0, own - a.window + 1); position <= own; ++position) {
    const int64_t page = c.tables[size_t(row * a.pages_per_seq + position / a.page_size)];
    slots.push_back(size_t((page * a.kv_heads + head / a.q_per_kv) * a.page_size + position % a.page_size));
    double score = 0;
    for (size_t d = 0; d < D; ++d) score += double(c.q[at * D + d]) * c.key(slots.back() * D + d, c.k, c.k_scales);
    score *= a.scale;
    scores.push_back(a.soft_cap == 0 ? score : a.soft_cap * std::tanh(score / a.soft_cap));
    top = std::max(top, scores.back());
  }
  double total = c.sinks.empty() ? 0 : std::exp(c.sinks[size_t(head)] - top);
  for (size_t i = 0; i < slots.size(); ++i) {
    total += std::exp(scores[i] - top);
    for (size_t d = 0; d < D; ++d) sum[d] += std::exp(scores[i] - top) * c.key(slots[i] * D + d, c.v, c.v_scales);
  }
  const double rounding = a.q_dtype == Dtype::bfloat16 ? 1.0 / 256 : 0;
  for (size_t d = 0; d < D; ++d) worst = std::max(worst, std::abs(output(c, at * D + d) - sum[d] / total) - rounding * std::abs(sum[d] / total));
  worst = std::max(worst, std::abs(c.lse[at] - (top + std::log(total))));
  return std::isnan(worst) ? INFINITY : worst;
}

int check_functions(const AttentionKernels& functions, const char* name) {
  double exp_error = 0, tanh_error = 0;
  for (double x = -86.9; x <= 0; x += 1.0 / 1024) {
    exp_error = std::max(exp_error, std::abs(functions.exp(float(x)) / std::exp(double(float(x))) - 1));
  }
  for (double x = 1.0 / 65536; x < 12; x *= 1.0001) {
    tanh_error = std::max(tanh_error, std::abs(functions.tanh(float(-x)) / std::tanh(double(float(-x))) - 1));
  }
  const bool edges = functions.exp(0.0f) == 1 && functions.exp(-INFINITY) == 0 && functions.exp(-1e30f) == 0 && functions.tanh(0.0f) == 0 &&
                     functions.tanh(INFINITY) == 1 && functions.tanh(-INFINITY) == -1 && std::isnan(functions.exp(NOT_A_NUMBER)) &&
                     std::isnan(functions.tanh(NOT_A_NUMBER));
  std::printf("%s: exp %.2g, tanh %.2g, edges %s\n", name, exp_error, tanh_error, edges ? "right" : "wrong");
  return exp_error < 2e-7 && tanh_error < 3e-7 && edges ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  const int cases = count > 1 ? std::atoi(arguments[1]) : 100;
  int wrong = 0;
  OwnPool one(0), four(3);
  for (const Target target : {Target::baseline, Target::avx2, Target::avx512}) {
    if (!has(target)) continue;
    wrong += check_functions(attention_kernels(target), name_of(target));
    std::mt19937 random(7);
    double worst = 0;
    for (int i = 0; i < cases; ++i) {
      const std::unique_ptr<Case> made = make_case(random);
      Case& c = *made;
      run_attention(c.call, attention_kernels(target), four);
      for (int64_t at = 0; at < int64_t(c.lse.size()); ++at) {
        const int64_t heads = c.call.kv_heads * c.call.q_per_kv;
        worst = std::max(worst, error_of(c, at / heads / c.call.queries, at / heads % c.call.queries, at % heads));
      }
      const std::vector<float> out = c.out, lse = c.lse;
      const std::vector<uint16_t> out16 = c.out16;
      run_attention(c.call, attention_kernels(target), one);
      const bool same = std::memcmp(out.data(), c.out.data(), out.size() * 4) == 0 && out16 == c.out16 &&
                        std::memcmp(lse.data(), c.lse.data(), lse.size() * 4) == 0;
      if (!same) std::printf("case %d: the bits depend on the threads\n", i), ++wrong;
    }
    std::printf("%s: %d cases, greatest error %.2g\n", name_of(target), cases, worst);
    if (!(worst < 2e-5)) ++wrong;
  }
  return wrong;
}
