#pragma once
// Handles inside the structs that travel by value: eachHandle(s, f) calls f on every one, as an lvalue. A
// struct without an overload holds none. Host pointers inside are the business of the named functions in
// client/calls and server/worker/calls.

#include "schema/handles.h"
#include "schema/session_calls.h"

namespace gpupool::schema {

template <class T, class F>
void eachHandle(T&, F&&) {}

template <class F>
void eachHandle(CUDA_MEMCPY2D_v2& s, F&& f) {
  if (s.srcMemoryType == CU_MEMORYTYPE_ARRAY) f(s.srcArray);
  if (s.dstMemoryType == CU_MEMORYTYPE_ARRAY) f(s.dstArray);
}
template <class F>
void eachHandle(CUDA_MEMCPY3D_v2& s, F&& f) {
  if (s.srcMemoryType == CU_MEMORYTYPE_ARRAY) f(s.srcArray);
  if (s.dstMemoryType == CU_MEMORYTYPE_ARRAY) f(s.dstArray);
}
template <class F>
void eachHandle(CUDA_MEMCPY3D_PEER& s, F&& f) {
  if (s.srcMemoryType == CU_MEMORYTYPE_ARRAY) f(s.srcArray);
  if (s.dstMemoryType == CU_MEMORYTYPE_ARRAY) f(s.dstArray);
  f(s.srcContext);
  f(s.dstContext);
}
template <class F>
void eachHandle(CUDA_RESOURCE_DESC& s, F&& f) {
  if (s.resType == CU_RESOURCE_TYPE_ARRAY) f(s.res.array.hArray);
  if (s.resType == CU_RESOURCE_TYPE_MIPMAPPED_ARRAY) f(s.res.mipmap.hMipmappedArray);
}
template <class F>
void eachHandle(CUlaunchAttribute& s, F&& f) {
  if (s.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT) f(s.value.programmaticEvent.event);
  if (s.id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT) f(s.value.launchCompletionEvent.event);
}
template <class F>
void eachHandle(SmSource& s, F&& f) {
  f(s.green);
}

}  // namespace gpupool::schema
