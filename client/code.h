#pragma once
// Modules and libraries: images go to the worker by content, handles are minted here.

#include "client/image.h"
#include "client/objects.h"
#include "client/session.h"

namespace gpupool::client {

// Sends the image unless the worker holds one of that content.
CUresult sendImage(CUcontext context, std::span<const std::byte> bytes, schema::ImageName& name);

// The library's module in `context`.
CUresult moduleIn(Context& context, CUlibrary library, CUmodule* out);
// The context ended, and with it its modules and functions.
void forgetCode(CUcontext context);

}  // namespace gpupool::client
