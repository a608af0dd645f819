// What Python asks the library about itself before it registers a handler.
#include <string>

#include "ffi.h"
#include "target.h"

extern "C" {

// Of the sources that it was built from: the names under which handlers are registered carry it.
JAXKV_EXPORT const char* jaxkv_build() { return JAXKV_BUILD; }

// The version of XLA's interface that handlers were compiled against. A runtime with an older one would refuse them, and with them the
// whole platform.
JAXKV_EXPORT int jaxkv_ffi_major() { return XLA_FFI_API_MAJOR; }
JAXKV_EXPORT int jaxkv_ffi_minor() { return XLA_FFI_API_MINOR; }

JAXKV_EXPORT const char* jaxkv_targets() {
  static const std::string names = jaxkv::targets_here();
  return names.c_str();
}

JAXKV_EXPORT const char* jaxkv_target() { return jaxkv::name_of(jaxkv::current_target()); }

JAXKV_EXPORT int jaxkv_set_target(const char* name) { return jaxkv::set_target(name); }
}
