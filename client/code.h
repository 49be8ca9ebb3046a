#pragma once
// Modules, libraries, kernels: images go to the worker by content, layouts and attributes come back once per
// kernel.

#include "client/image.h"
#include "client/objects.h"
#include "client/session.h"

namespace gpupool::client {

// Sends the image unless the worker holds one of that content.
CUresult sendImage(CUcontext context, std::span<const std::byte> bytes, schema::ImageName& name);

// The launchable behind a CUfunction or, cast to it, a CUkernel. Null: neither.
Function* findFunction(CUfunction handle);
// Its layout and attributes are known afterwards. device: the application's.
CUresult describe(CUfunction handle, Function& function, CUcontext context, CUdevice device);
// Before its first launch: from a launch on whose kernel may print, synchronising brings the output.
void notePrinting(const Function& function);
CUresult functionName(CUfunction handle, Function& function, CUcontext context, const char** name);

// A kernel node's or launch's parameters as one packed buffer, from kernelParams or extra.
CUresult packParameters(CUfunction handle, void** kernelParams, void** extra, CUcontext context,
                        CUdevice device, std::vector<std::byte>& out);

}  // namespace gpupool::client
