// exp and tanh of vectors, the same in every lane whatever stands in the others. NaN stays NaN.
#pragma once

#include "simd.h"

namespace jaxkv {
namespace JAXKV_TARGET {
namespace {

// exp of numbers up to 0, as differences from a maximum are: within 2e-7 of exp, relatively; exactly 1 at 0, and 0 below -87, -inf included.
// Source: the reduction and polynomial of Cephes' expf.
JAXKV_INLINE F exp_of(F x) {
  const U out_of_range = (U)(x < -87.0f);
  x = choose(out_of_range, splat(-87.0f), x);
  const F shifted = fma(x, splat(1.44269504f), splat(12582912.0f));  // 1.5 * 2^23: the last bit counts ones
  const F k = shifted - splat(12582912.0f);
  F r = fma(k, splat(-0.693359375f), x);
  r = fma(k, splat(2.12194440e-4f), r);
  F y = splat(1.9875691500e-4f);
  y = fma(y, r, splat(1.3981999507e-3f));
  y = fma(y, r, splat(8.3334519073e-3f));
  y = fma(y, r, splat(4.1665795894e-2f));
  y = fma(y, r, splat(1.6666665459e-1f));
  y = fma(y, r, splat(5.0000001201e-1f));
  y = fma(y, r * r, r) + splat(1.0f);
  const U power = (bits_of(shifted) - bits_of(splat(12582912.0f)) + 127u) << 23;
  return choose(out_of_range, F{}, y * from_bits(power));
}

// Within 3e-7 of tanh, relatively. Source: the polynomial near 0 of Cephes' tanhf.
JAXKV_INLINE F tanh_of(F x) {
  const U sign = bits_of(x) & 0x80000000u;
  const F size = from_bits(bits_of(x) & 0x7fffffffu);
  const F e = exp_of(size * splat(-2.0f));
  const F far = (splat(1.0f) - e) / (splat(1.0f) + e);
  const F square = x * x;
  F y = splat(-5.70498872745e-3f);
  y = fma(y, square, splat(2.06390887954e-2f));
  y = fma(y, square, splat(-5.37397155531e-2f));
  y = fma(y, square, splat(1.33314422036e-1f));
  y = fma(y, square, splat(-3.33332819422e-1f));
  const F near = fma(y * square, size, size);
  return from_bits(sign | bits_of(choose((U)(size < 0.625f), near, far)));
}

}  // namespace
}  // namespace JAXKV_TARGET
}  // namespace jaxkv
