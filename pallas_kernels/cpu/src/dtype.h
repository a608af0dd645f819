// The dtypes of activations, weights and plain pages, between handlers and kernels.
#pragma once

#include <cstdint>

namespace jaxkv {

enum class Dtype : int32_t { float32, bfloat16, float16, int8, float8_e4m3fn, float8_e5m2 };

}  // namespace jaxkv
