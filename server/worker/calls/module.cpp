// Code: images by content, modules and libraries from them, kernels and their layouts, the linker.
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "server/arena_mmap.h"
#include "server/fatbin/fatbin.h"
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
using LinkCreate = GPUPOOL_ROW(sessionLinkCreate);
using LinkAdd = GPUPOOL_ROW(sessionLinkAdd);
using LinkComplete = GPUPOOL_ROW(sessionLinkComplete);
using LinkRead = GPUPOOL_ROW(sessionLinkRead);
using LinkDestroy = GPUPOOL_ROW(cuLinkDestroy);

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

// What the driver is handed: the bytes, or the fatbin wrapper they came in, rebuilt around them. A fatbin's
// own lengths must not lead the driver past the bytes that were sent. kind 2, a device-linked program:
// several fatbins in one image, the linked one first, then those it was linked from.
class DriverImage {
 public:
  DriverImage(std::shared_ptr<Image> image, unsigned kind) : image_(std::move(image)) {
    auto bytes = image_->bytes();
    if (kind == 0) {
      bool isFatbin = bytes.size() >= 4 && std::memcmp(bytes.data(), &fatbin::kMagic, 4) == 0;
      if (!isFatbin || fatbin::fits(bytes)) pointer_ = bytes.data();
      parts_ = {bytes};
    } else if (kind == 1 ? fatbin::fits(bytes) : readLinked(bytes)) {
      if (kind == 1) parts_ = {bytes};
      wrapper_.data = parts_[0].data();
      pointer_ = &wrapper_;
    }
  }
  DriverImage(const DriverImage&) = delete;  // the driver may hold pointers into it
  DriverImage& operator=(const DriverImage&) = delete;

  const void* pointer() const { return pointer_; }  // null: the image is malformed
  Image& image() const { return *image_; }
  bool mayPrint(unsigned architecture) const {
    for (auto part : parts_)
      if (fatbin::mayPrint(part, architecture)) return true;
    return false;
  }

 private:
  bool readLinked(std::span<const std::byte> bytes) {
    if (!Images::readLinked(bytes, parts_)) return false;
    for (size_t i = 1; i < parts_.size(); ++i) linked_.push_back(parts_[i].data());
    linked_.push_back(nullptr);
    wrapper_.version = 2;
    wrapper_.auxiliary = linked_.data();
    return true;
  }

  std::shared_ptr<Image> image_;
  fatbin::Wrapper wrapper_;
  std::vector<std::span<const std::byte>> parts_;
  std::vector<const void*> linked_;
  const void* pointer_ = nullptr;
};

// Found out once per image and kept with it: unpacking costs as much as loading.
bool mayPrint(Session& session, const schema::ImageName& name, const DriverImage& code) {
  const unsigned arch = session.architecture();
  if (auto& note = code.image().note; note && note->architecture == arch) return note->mayPrint != 0;
  const bool prints = code.mayPrint(arch);
  session.images().keepNote(name, code.image(), {arch, prints});
  return prints;
}

// Options whose value is a number. The others' are places the driver reads or writes: a client has none here.
bool isNumber(CUjit_option option) {
  switch (option) {
    case CU_JIT_WALL_TIME:
    case CU_JIT_INFO_LOG_BUFFER:
    case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
    case CU_JIT_ERROR_LOG_BUFFER:
    case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
    case CU_JIT_GLOBAL_SYMBOL_NAMES:
    case CU_JIT_GLOBAL_SYMBOL_ADDRESSES:
    case CU_JIT_REFERENCED_KERNEL_NAMES:
    case CU_JIT_REFERENCED_VARIABLE_NAMES:
      return false;
    default:
      return option >= 0 && option < CU_JIT_NUM_OPTIONS;
  }
}

// JIT options with the log buffers added; values are integers in pointers' clothes.
struct JitOptions {
  std::vector<CUjit_option> names;
  std::vector<void*> values;
  bool good = true;  // false: not to be handed to the driver
  template <class Options, class Values>
  JitOptions(Options& options, Values& numbers) {
    good = options.size() == numbers.size();
    for (size_t i = 0; good && i < options.size(); ++i) {
      good = isNumber(options[i]);
      names.push_back(options[i]);
      values.push_back(reinterpret_cast<void*>(numbers[i]));
    }
  }
  void log(CUjit_option buffer, CUjit_option size, std::vector<char>& text, bool wanted) {
    if (!wanted || text.size() < 2) return;
    names.push_back(buffer);
    values.push_back(text.data());
    names.push_back(size);
    values.push_back(reinterpret_cast<void*>(text.size() - 1));
  }
};

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

// CU_LIBRARY_BINARY_IS_PRESERVED: "code can be accessed at any point until cuLibraryUnload" (driver manual,
// Library Management). Without it the driver, which loads kernels when they are first used, makes a copy of
// its own; so it reads the cache's file, which costs this process no memory, and every session of the server
// shares the pages.
void loadLibrary(Session& session, Call& call) {
  load<LibraryLoad, "library">(
      session, call, true, [&](const void* image, JitOptions& options, auto& served) {
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

// ---- linker ----
// The driver's JIT compiler keeps a link's state with the thread that made it: destroying a link whose input
// was refused on another thread crashes inside it (driver 580). So one thread serves all linker calls; theirs
// is a lane of its own.
class LinkThread {
 public:
  CUresult run(const std::function<CUresult()>& job) {
    std::unique_lock lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
    idle_.wait(lock, [&] { return job_ == nullptr; });
    CUresult result = CUDA_SUCCESS;
    bool done = false;
    job_ = &job;
    result_ = &result;
    done_ = &done;
    changed_.notify_all();
    finished_.wait(lock, [&] { return done; });
    return result;
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return job_ != nullptr; });
      auto* job = job_;
      lock.unlock();
      CUresult result = (*job)();
      lock.lock();
      *result_ = result;
      *done_ = true;
      job_ = nullptr;
      finished_.notify_all();
      idle_.notify_one();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_, finished_, idle_;
  const std::function<CUresult()>* job_ = nullptr;
  CUresult* result_ = nullptr;
  bool* done_ = nullptr;
  std::thread thread_;
};

// In the context of the call.
CUresult onLinkThread(Session& session, const Call& call, const std::function<CUresult()>& job) {
  static auto* thread = new LinkThread;
  return thread->run([&] {
    CUresult status = session.makeCurrent(call.frame.context);
    return status == CUDA_SUCCESS ? job() : status;
  });
}

}  // namespace

struct Link {
  std::unique_ptr<JitOptions> options;  // the driver writes through them until cuLinkDestroy
  std::vector<char> info = std::vector<char>(16384), error = std::vector<char>(16384);
  std::vector<std::byte> result;
};
struct LinkTable {
  std::unordered_map<uint64_t, std::shared_ptr<Link>> links;  // by handle
};

namespace {

std::mutex linksMutex;  // of every session's table

std::shared_ptr<Link> linkOf(Session& session, uint64_t id) {
  std::lock_guard lock(linksMutex);
  auto& table = session.links();
  if (table == nullptr) table = std::make_shared<LinkTable>();
  auto& link = table->links[id];
  if (link == nullptr) link = std::make_shared<Link>();
  return link;
}

void forgetLink(Session& session, uint64_t id) {
  std::lock_guard lock(linksMutex);
  if (session.links() != nullptr) session.links()->links.erase(id);
}

template <class S>
void copyLogs(S& served, const Link& link) {
  auto copy = [](auto& slot, const std::vector<char>& log) {
    if (slot.wanted() && !slot.array().empty())
      ::strncpy(slot.array().data(), log.data(), slot.array().size() - 1);
  };
  copy(served.template get<"infoLog">(), link.info);
  copy(served.template get<"errorLog">(), link.error);
}

void linkCreate(Session& session, Call& call) {
  Served<LinkCreate> served(session, call);
  if (!served.open()) return;
  auto link = linkOf(session, served.get<"link">().id());
  link->options =
      std::make_unique<JitOptions>(served.get<"options">().array(), served.get<"values">().array());
  JitOptions& options = *link->options;
  if (!options.good) {
    forgetLink(session, served.get<"link">().id());
    return served.close(CUDA_ERROR_INVALID_VALUE);
  }
  options.log(CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, link->info, true);
  options.log(CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, link->error, true);
  CUresult status = onLinkThread(session, call, [&] {
    return session.driver().cuLinkCreate_v2(static_cast<unsigned>(options.names.size()), options.names.data(),
                                            options.values.data(), served.get<"link">().pass());
  });
  if (status != CUDA_SUCCESS) forgetLink(session, served.get<"link">().id());
  served.close(status);
}

void linkAdd(Session& session, Call& call) {
  Served<LinkAdd> served(session, call);
  if (!served.open()) return;
  auto image = session.images().take(served.get<"image">().value());
  if (image == nullptr) return served.close(CUDA_ERROR_INVALID_IMAGE);
  DriverImage code(image, 0);
  if (code.pointer() == nullptr) return served.close(CUDA_ERROR_INVALID_IMAGE);
  JitOptions options(served.get<"options">().array(), served.get<"values">().array());
  if (!options.good) return served.close(CUDA_ERROR_INVALID_VALUE);
  // PTX with the terminator that follows every image.
  size_t size = image->bytes().size() + (served.get<"type">().value() == CU_JIT_INPUT_PTX ? 1 : 0);
  CUresult status = onLinkThread(session, call, [&] {
    return session.driver().cuLinkAddData_v2(
        served.get<"link">().value(), served.get<"type">().value(), const_cast<void*>(code.pointer()), size,
        served.get<"name">().pass(), static_cast<unsigned>(options.names.size()), options.names.data(),
        options.values.data());
  });
  copyLogs(served, *linkOf(session, served.get<"link">().id()));
  served.close(status);
}

// The driver may keep writing into the link's log buffers until now.
void linkDestroy(Session& session, Call& call) {
  Served<LinkDestroy> served(session, call);
  if (!served.open()) return;
  uint64_t id = served.get<"state">().id();
  CUresult status =
      onLinkThread(session, call, [&] { return served.invoke(session.driver().cuLinkDestroy); });
  if (status == CUDA_SUCCESS) forgetLink(session, id);
  served.close(status);
}

void linkComplete(Session& session, Call& call) {
  Served<LinkComplete> served(session, call);
  if (!served.open()) return;
  auto link = linkOf(session, served.get<"link">().id());
  void* result = nullptr;
  size_t bytes = 0;
  CUresult status = onLinkThread(session, call, [&] {
    return session.driver().cuLinkComplete(served.get<"link">().value(), &result, &bytes);
  });
  if (status == CUDA_SUCCESS) {
    auto* first = static_cast<const std::byte*>(result);
    link->result.assign(first, first + bytes);
    served.get<"bytes">().plain() = bytes;
  }
  copyLogs(served, *link);
  served.close(status);
}

void linkRead(Session& session, Call& call) {
  Served<LinkRead> served(session, call);
  if (!served.open()) return;
  auto link = linkOf(session, served.get<"link">().id());
  size_t offset = served.get<"offset">().value();
  auto& room = served.get<"data">().array();
  size_t n = offset <= link->result.size() ? std::min(room.size(), link->result.size() - offset) : 0;
  if (n != 0) std::memcpy(room.data(), link->result.data() + offset, n);
  served.get<"bytes">().plain() = n;
  served.close(CUDA_SUCCESS);
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
  table.add<LinkCreate>(&linkCreate);
  table.add<LinkAdd>(&linkAdd);
  table.add<LinkComplete>(&linkComplete);
  table.add<LinkRead>(&linkRead);
  table.add<LinkDestroy>(&linkDestroy);
}

}  // namespace gpupool::server
