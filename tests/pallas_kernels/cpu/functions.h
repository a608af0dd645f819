// The kernels' exp and tanh of one number, for the driver that measures them.
#pragma once

#include "target.h"

namespace jaxkv {

struct Functions {
  float (*exp)(float);
  float (*tanh)(float);
};

JAXKV_TABLE(Functions, functions)

}  // namespace jaxkv
