#pragma once
// nvml.h as this library needs it: every exported name is declared under its own name, also the early
// versions.

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>

#define NVML_EXPORT extern "C" __attribute__((visibility("default")))
