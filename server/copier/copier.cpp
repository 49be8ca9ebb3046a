#include "server/copier/copier.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>

#include "base/descriptor_passing.h"
#include "base/descriptors.h"
#include "base/log.h"
#include "schema/worker.capnp.h"
#include "server/copier/connection.h"
#include "server/copier/devices.h"
#include "server/copier/store.h"
#include "server/worker_process.h"

namespace gpupool::server {
namespace {

constexpr char kMode[] = "--copier";

// What every connection uses, until the process ends.
struct Copier {
  std::unique_ptr<const Driver> driver;
  std::unique_ptr<CopierDevices> devices;
  std::unique_ptr<CopierStore> store;
  bool verify = false;
};

uint64_t bytesIn(const std::string& option, const std::string& text) {
  char* end = nullptr;
  errno = 0;
  const unsigned long long value = std::strtoull(text.c_str(), &end, 10);
  if (text.empty() || text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0)
    throw std::runtime_error(option + ": '" + text + "' is no number of bytes");
  return value;
}

void endAtOnce(int) { _exit(0); }

std::unique_ptr<Copier> makeCopier(const CopierArguments& arguments) {
  auto copier = std::make_unique<Copier>();
  copier->verify = arguments.verify;
  copier->driver = Driver::load(arguments.driver);
  if (const CUresult result = copier->driver->cuInit(0); result != CUDA_SUCCESS)
    throw std::runtime_error("cuInit: " + copier->driver->describe(result));
  copier->devices = std::make_unique<CopierDevices>(*copier->driver);
  CopierStore::Options options;
  options.budget = arguments.budget;
  options.folder = arguments.folder;
  options.onSlab = [devices = copier->devices.get()](std::byte* data, uint64_t bytes) {
    devices->registerMemory(data, bytes);
  };
  copier->store = std::make_unique<CopierStore>(std::move(options));
  if (arguments.touchAhead == 0) return copier;
  // Without a context the memory is registered later, with the first.
  if (const std::string why = copier->devices->use(0); !why.empty()) GPUPOOL_WARNING("%s", why.c_str());
  if (!copier->store->touchAhead(arguments.touchAhead))
    GPUPOOL_WARNING("this machine has no memory to be made ready for suspended sessions");
  return copier;
}

void serveConnection(Copier& copier, Descriptor socket) {
  try {
    CopierConnection connection(std::move(socket), *copier.devices, *copier.store, copier.verify);
    const std::string why = connection.serve();
    if (!why.empty()) GPUPOOL_WARNING("a worker's connection was cut off: %s", why.c_str());
  } catch (const std::exception& error) {
    GPUPOOL_ERROR("a worker's connection was cut off: %s", error.what());
  }
}

// False: the process is to end.
bool obey(Copier& copier, std::span<capnp::word> room) {
  const auto received = receiveWithDescriptors(kControlDescriptor, std::as_writable_bytes(room));
  std::vector<Descriptor> descriptors;
  descriptors.reserve(received.descriptors.size());
  for (int descriptor : received.descriptors) descriptors.emplace_back(descriptor);
  if (received.bytes <= 0) return false;
  try {
    const size_t words = static_cast<size_t>(received.bytes) / sizeof(capnp::word);
    capnp::FlatArrayMessageReader reader(kj::arrayPtr(room.data(), received.whole ? words : 0));
    const auto order = reader.getRoot<schema::WorkerOrder>();
    if (order.isStop()) return false;
    if (order.isServe() && descriptors.size() == 1) {
      std::thread(serveConnection, std::ref(copier), std::move(descriptors.front())).detach();
      return true;
    }
    GPUPOOL_ERROR("an order of the server is none for a copier");
  } catch (const kj::Exception& error) {
    GPUPOOL_ERROR("an order of the server is malformed: %s", error.getDescription().cStr());
  } catch (const std::exception& error) {
    GPUPOOL_ERROR("a worker's connection cannot be served: %s", error.what());
  }
  return true;
}

}  // namespace

bool isCopier(int count, char** words) {
  return std::any_of(words + 1, words + count, [](const char* word) { return strcmp(word, kMode) == 0; });
}

CopierArguments parseCopierArguments(int count, char** words) {
  CopierArguments arguments;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    const auto value = [&] {
      if (++i >= count) throw std::runtime_error(word + " needs a value");
      return std::string(words[i]);
    };
    if (word == kMode) continue;
    if (word == "--driver") {
      arguments.driver = value();
    } else if (word == "--budget") {
      arguments.budget = bytesIn(word, value());
    } else if (word == "--folder") {
      arguments.folder = value();
    } else if (word == "--touch-ahead") {
      arguments.touchAhead = bytesIn(word, value());
    } else if (word == "--verify") {
      arguments.verify = true;
    } else {
      throw std::runtime_error("unknown argument '" + word + "' of a copier");
    }
  }
  return arguments;
}

int runCopier(const CopierArguments& arguments) {
  log::setProcessName("copier");
  raiseDescriptorLimit();
  signal(SIGTERM, endAtOnce);
  signal(kServerDiedSignal, endAtOnce);
  WorkerProcess process(kControlDescriptor, arguments.rowsHash);
  std::unique_ptr<Copier> copier;
  try {
    copier = makeCopier(arguments);
  } catch (const std::exception& error) {
    process.reportFailed(error.what());
    return 1;
  }
  process.reportReady(copier->driver->path());
  std::vector<capnp::word> room(kMaxDatagram / sizeof(capnp::word));
  while (obey(*copier, room)) {
  }
  // Connections' threads may be inside the driver: the process's end ends them, and frees everything.
  _exit(0);
}

}  // namespace gpupool::server
