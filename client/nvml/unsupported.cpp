// The functions of nvml.h that answer as a driver without their feature. Their arguments are not looked at,
// so the header, which declares them, is not included here.
namespace gpupool::nvml {
int notSupported();  // system.cpp
}

#define UNSUPPORTED(name) \
  extern "C" __attribute__((visibility("default"))) int name() { return gpupool::nvml::notSupported(); }
#include "client/nvml/unsupported.def"
