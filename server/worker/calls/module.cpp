// Code: images by content, modules and libraries from them, kernels and their layouts.
#include <cstring>
#include <memory>

#include "server/arena_mmap.h"
#include "server/worker/calls/driver_code.h"
#include "server/worker/serve.h"

namespace gpupool::server {
namespace {

using ImageOffer = GPUPOOL_ROW(sessionImageOffer);
using ImageData = GPUPOOL_ROW(sessionImageData);
using ModuleLoad = GPUPOOL_ROW(sessionModuleLoad);
using LibraryLoad = GPUPOOL_ROW(sessionLibraryLoad);
using FunctionInfo = GPUPOOL_ROW(sessionFunctionInfo);
using FunctionName = GPUPOOL_ROW(sessionFunctionName);
using ModuleFunctions = GPUPOOL_ROW(sessionModuleFunctions);
using LibraryKernels = GPUPOOL_ROW(sessionLibraryKernels);
using ModuleGlobal = GPUPOOL_ROW(cuModuleGetGlobal_v2);
using LibraryGlobal = GPUPOOL_ROW(cuLibraryGetGlobal);
using LibraryManaged = GPUPOOL_ROW(cuLibraryGetManaged);
using ModuleUnload = GPUPOOL_ROW(cuModuleUnload);
using LibraryUnload = GPUPOOL_ROW(cuLibraryUnload);

void offerImage(Session& session, Call& call) {
  Served<ImageOffer> served(session, call);
  if (!served.open()) return;
  served.get<"have">().plain() = session.images().offer(served.get<"image">().value());
  served.close(CUDA_SUCCESS);
}

void imageData(Session& session, Call& call) {
  Served<ImageData> served(session, call);
  if (!served.open()) return;
  served.close(session.images().append(served.get<"image">().value(), served.get<"offset">().value(),
                                       std::as_bytes(std::span(served.get<"data">().array()))));
}

// Found out once per image and kept with it: unpacking costs as much as loading.
bool mayPrint(Session& session, const schema::ImageName& name, const DriverImage& code) {
  const unsigned arch = session.architecture();
  if (auto& note = code.image().note; note && note->architecture == arch) return note->mayPrint != 0;
  const bool prints = code.mayPrint(arch);
  session.images().keepNote(name, code.image(), {arch, prints});
  return prints;
}

// keep: the driver was told that it may read the code until the handle that was made is unloaded.
template <class R, schema::Name Minted, class Make>
void load(Session& session, Call& call, bool keep, Make&& make) {
  Served<R> served(session, call);
  if (!served.open()) return;
  auto& name = served.template get<"image">().value();
  auto image = session.images().take(name);
  if (image == nullptr) return served.close(CUDA_ERROR_INVALID_IMAGE);
  auto code = std::make_shared<DriverImage>(image, served.template get<"kind">().value());
  if (code->pointer() == nullptr) return served.close(CUDA_ERROR_INVALID_IMAGE);
  JitOptions options(served.template get<"options">().array(), served.template get<"values">().array());
  if (!options.good) return served.close(CUDA_ERROR_INVALID_VALUE);
  auto& info = served.template get<"infoLog">();
  auto& error = served.template get<"errorLog">();
  options.log(CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, info.array(), info.wanted());
  options.log(CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, error.array(), error.wanted());
  CUresult status;
  {
    PlaceGlobals place;
    status = make(code->pointer(), options, served);
  }
  if (status == CUDA_SUCCESS) {
    served.template get<"printing">().plain() = mayPrint(session, name, *code);
    if (keep) session.images().keep(served.template get<Minted>().id(), code);
  }
  image->settle();
  served.close(status);
}

void loadModule(Session& session, Call& call) {
  load<ModuleLoad, "module">(session, call, false, [&](const void* image, JitOptions& options, auto& served) {
    return session.driver().cuModuleLoadDataEx(served.template get<"module">().pass(), image,
                                               static_cast<unsigned>(options.names.size()),
                                               options.names.data(), options.values.data());
  });
}

// While it lives no context is current on this thread.
class NoContext {
 public:
  explicit NoContext(const Driver& driver) : driver_(driver) {
    if (driver_.cuCtxGetCurrent(&found_) == CUDA_SUCCESS && found_ != nullptr)
      driver_.cuCtxSetCurrent(nullptr);
  }
  ~NoContext() {
    if (found_ != nullptr) driver_.cuCtxSetCurrent(found_);
  }
  NoContext(const NoContext&) = delete;
  NoContext& operator=(const NoContext&) = delete;

 private:
  const Driver& driver_;
  CUcontext found_ = nullptr;
};

// CU_LIBRARY_BINARY_IS_PRESERVED: "code can be accessed at any point until cuLibraryUnload" (driver manual,
// Library Management). Without it the driver, which loads kernels when they are first used, makes a copy of
// its own; so it reads the cache's file, which costs this process no memory, and every session of the server
// shares the pages.
// A driver may load at once for the context that is current. The frame names none, and the one that an
// earlier frame left current is not the same in a rebuilt session: then the code's variables lie elsewhere.
void loadLibrary(Session& session, Call& call) {
  load<LibraryLoad, "library">(
      session, call, true, [&](const void* image, JitOptions& options, auto& served) {
        const NoContext none(session.driver());
        CUlibraryOption preserved = CU_LIBRARY_BINARY_IS_PRESERVED;
        void* yes = reinterpret_cast<void*>(1);
        return session.driver().cuLibraryLoadData(
            served.template get<"library">().pass(), image, options.names.data(), options.values.data(),
            static_cast<unsigned>(options.names.size()), &preserved, &yes, 1);
      });
}

// The driver loads code when it is first needed: left to itself, at a launch, whenever that is. Loaded here,
// with the call in the record, its variables lie where a rebuilt session has them.
void loadNow(const Driver& driver, CUfunction function, bool kernel) {
  CUfunction loaded = kernel ? nullptr : function;
  if (kernel && driver.cuKernelGetFunction(&loaded, reinterpret_cast<CUkernel>(function)) != CUDA_SUCCESS)
    return;
  if (driver.cuFuncLoad != nullptr) driver.cuFuncLoad(loaded);  // what fails here fails at the launch
}

void functionInfo(Session& session, Call& call) {
  Served<FunctionInfo> served(session, call);
  if (!served.open()) return;
  const Driver& driver = session.driver();
  CUfunction function = served.get<"function">().value();
  bool kernel = handles::kindOf(served.get<"function">().id()) == HandleKind::kernel;
  CUdevice device = served.get<"device">().value();
  schema::FunctionInfo& info = served.get<"info">().plain();
  PlaceGlobals place;
  loadNow(driver, function, kernel);
  for (int a = 0; a < schema::kFunctionAttributes; ++a) {
    auto attribute = static_cast<CUfunction_attribute>(a);
    CUresult status = kernel ? driver.cuKernelGetAttribute(&info.attributes[a], attribute,
                                                           reinterpret_cast<CUkernel>(function), device)
                             : driver.cuFuncGetAttribute(&info.attributes[a], attribute, function);
    if (status == CUDA_SUCCESS)
      info.known |= 1u << a;
    else if (a == 0)
      return served.close(status);
  }
  auto& layout = served.get<"layout">().array();
  size_t count = 0;
  while (count < kMaxOutElements) {
    size_t offset = 0, size = 0;
    CUresult status =
        kernel ? driver.cuKernelGetParamInfo(reinterpret_cast<CUkernel>(function), count, &offset, &size)
               : driver.cuFuncGetParamInfo(function, count, &offset, &size);
    if (status != CUDA_SUCCESS) break;
    if (count < layout.size()) layout[count] = {static_cast<uint32_t>(offset), static_cast<uint32_t>(size)};
    ++count;
  }
  info.parameterCount = static_cast<uint32_t>(count);
  served.get<"layoutCount">().plain() = std::min(count, layout.size());
  served.close(CUDA_SUCCESS);
}

void functionName(Session& session, Call& call) {
  Served<FunctionName> served(session, call);
  if (!served.open()) return;
  const char* name = nullptr;
  CUfunction function = served.get<"function">().value();
  bool kernel = handles::kindOf(served.get<"function">().id()) == HandleKind::kernel;
  CUresult status = kernel ? session.driver().cuKernelGetName(&name, reinterpret_cast<CUkernel>(function))
                           : session.driver().cuFuncGetName(&name, function);
  auto& room = served.get<"name">().array();
  if (status == CUDA_SUCCESS && !room.empty()) ::strncpy(room.data(), name, room.size() - 1);
  served.close(status);
}

void moduleFunctions(Session& session, Call& call) {
  Served<ModuleFunctions> served(session, call);
  if (!served.open()) return;
  unsigned count = 0;
  CUmodule module = served.get<"module">().value();
  CUresult status = session.driver().cuModuleGetFunctionCount(&count, module);
  auto& functions = served.get<"functions">().array();
  unsigned asked = std::min<unsigned>(count, static_cast<unsigned>(functions.size()));
  if (status == CUDA_SUCCESS && asked != 0)
    status = session.driver().cuModuleEnumerateFunctions(functions.data(), asked, module);
  served.get<"count">().plain() = asked;
  served.close(status);
}

void libraryKernels(Session& session, Call& call) {
  Served<LibraryKernels> served(session, call);
  if (!served.open()) return;
  unsigned count = 0;
  CUlibrary library = served.get<"library">().value();
  CUresult status = session.driver().cuLibraryGetKernelCount(&count, library);
  auto& kernels = served.get<"kernels">().array();
  unsigned asked = std::min<unsigned>(count, static_cast<unsigned>(kernels.size()));
  if (status == CUDA_SUCCESS && asked != 0)
    status = session.driver().cuLibraryEnumerateKernels(kernels.data(), asked, library);
  served.get<"count">().plain() = asked;
  served.close(status);
}

// The driver answers a null size pointer too, but the range must be known: copies are checked against it.
template <class R, auto Member>
void global(Session& session, Call& call) {
  Served<R> served(session, call);
  if (!served.open()) return;
  CUresult status;
  {
    PlaceGlobals place;
    CUdeviceptr address = 0;
    size_t bytes = 0;
    auto& owner = [&]() -> auto& {
      if constexpr (std::is_same_v<R, ModuleGlobal>)
        return served.template get<"hmod">();
      else
        return served.template get<"library">();
    }();
    status =
        (session.driver().*Member)(&address, &bytes, owner.value(), served.template get<"name">().pass());
    if (status == CUDA_SUCCESS) {
      session.space().addGlobal(owner.id(), {address, bytes, std::is_same_v<R, LibraryManaged>});
      served.template get<"dptr">().plain() = address;
      served.template get<"bytes">().plain() = bytes;
    }
  }
  served.close(status);
}

template <class R, auto Member, schema::Name Owner>
void unload(Session& session, Call& call) {
  Served<R> served(session, call);
  if (!served.open()) return;
  uint64_t owner = served.template get<Owner>().id();
  const auto globals = session.takeGlobals(owner);
  CUresult status = served.invoke(session.driver().*Member);
  for (const Space::Global& global : globals) {
    if (status == CUDA_SUCCESS)
      session.forgetMirror(global.address);
    else
      session.space().addGlobal(owner, global);
  }
  if (status == CUDA_SUCCESS) session.images().release(owner);
  served.close(status);
}

}  // namespace

void addModuleHandlers(HandlerTable& table) {
  table.add<ImageOffer>(&offerImage);
  table.add<ImageData>(&imageData);
  table.add<ModuleLoad>(&loadModule);
  table.add<LibraryLoad>(&loadLibrary);
  table.add<FunctionInfo>(&functionInfo);
  table.add<FunctionName>(&functionName);
  table.add<ModuleFunctions>(&moduleFunctions);
  table.add<LibraryKernels>(&libraryKernels);
  table.add<ModuleGlobal>(&global<ModuleGlobal, &Driver::cuModuleGetGlobal_v2>);
  table.add<LibraryGlobal>(&global<LibraryGlobal, &Driver::cuLibraryGetGlobal>);
  table.add<LibraryManaged>(&global<LibraryManaged, &Driver::cuLibraryGetManaged>);
  table.add<ModuleUnload>(&unload<ModuleUnload, &Driver::cuModuleUnload, "hmod">);
  table.add<LibraryUnload>(&unload<LibraryUnload, &Driver::cuLibraryUnload, "library">);
}

}  // namespace gpupool::server
