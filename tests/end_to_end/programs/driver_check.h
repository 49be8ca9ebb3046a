#pragma once
// check.h for programs that call the driver API.
#include <cuda.h>

#include "check.h"

namespace check {

inline const char* resultName(CUresult status) {
  const char* name = nullptr;
  return cuGetErrorName(status, &name) == CUDA_SUCCESS && name != nullptr ? name : "an unknown error";
}

inline void driver(CUresult status, const char* expression, const char* file, int line) {
  if (status != CUDA_SUCCESS) fail("%s gave %s (%s:%d)", expression, resultName(status), file, line);
}

inline void driverGives(CUresult status, CUresult expected, const char* expression, const char* file,
                        int line) {
  if (status != expected)
    fail("%s gave %s, expected %s (%s:%d)", expression, resultName(status), resultName(expected), file, line);
  say("%s: %s", expression, resultName(status));
}

}  // namespace check

#define DRIVER(call) ::check::driver((call), #call, CHECK_FILE, __LINE__)
#define DRIVER_GIVES(expected, call) ::check::driverGives((call), (expected), #call, CHECK_FILE, __LINE__)
