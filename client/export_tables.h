#pragma once
// cuGetExportTable: the undocumented tables that CUDA runtimes and libraries call besides the public
// functions.
//
// Slots that something calls are implemented, the others log once and return CUDA_ERROR_NOT_SUPPORTED. All of
// it is local: contexts come from contexts(), the rest through ExportTableHooks. Tables are filled at the
// first request and then never change; their addresses enter the self-test. Any thread, also before cuInit.
// Layouts and sizes as measured on driver 580.159.

#include <cuda.h>

#include <cstdint>
#include <vector>

namespace gpupool::client {

struct ExportTableHooks {
  // cuStreamGetId's answer for a created stream or 0, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD; an error for
  // anything else.
  CUresult (*streamId)(CUcontext context, CUstream stream, uint64_t* id);
  // The functions of a module, as the handles that cuModuleGetFunction gives. May wait for the server.
  CUresult (*functionsOfModule)(CUmodule module, std::vector<CUfunction>* functions);
  // cuModuleLoadData of a fatbin or its wrapper; runtimes before 12 load through a table.
  CUresult (*loadModule)(CUmodule* module, const void* image);
  // What cuDeviceGetUuid and cuDeviceGetAttribute 50, 33 and 34 say of device `ordinal`.
  int (*deviceCount)();
  CUresult (*deviceIdentity)(int ordinal, CUuuid* uuid, int* pciDomain, int* pciBus, int* pciDevice);
  // Which GPC every TPC of the current context's device lies in, and its rank there; equally many of both.
  CUresult (*tpcMap)(std::vector<unsigned char>* gpcs, std::vector<unsigned char>* ranks);
};

// Once, before the first context exists. The hooks must stay valid.
void setExportTableHooks(const ExportTableHooks& hooks);

// An unknown id is CUDA_ERROR_INVALID_VALUE and a null table, as measured.
CUresult getExportTable(const void** table, const CUuuid* id);

}  // namespace gpupool::client
