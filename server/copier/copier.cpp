#include "server/copier/copier.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
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
constexpr size_t kMostRoom = 8192;  // bytes of what comes to the door
constexpr int kLookMs = 100;        // how often it is seen that nothing is kept any more
// Workers that wait for a server in vain say so themselves, before what the copier has of them is lost.
constexpr std::chrono::seconds kWorkersFirst{5};

// What every connection uses, until the process ends.
struct Copier {
  std::unique_ptr<const Driver> driver;
  std::unique_ptr<CopierDevices> devices;
  std::unique_ptr<CopierStore> store;
  bool verify = false;
  std::atomic<size_t> connections{0};
  Descriptor door;                    // with which it outlives its server; -1: none
  std::chrono::milliseconds away{0};  // so long
};

uint64_t bytesIn(const std::string& option, const std::string& text) {
  char* end = nullptr;
  errno = 0;
  const unsigned long long value = std::strtoull(text.c_str(), &end, 10);
  if (text.empty() || text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0)
    throw std::runtime_error(option + ": '" + text + "' is no number of bytes");
  return value;
}

volatile sig_atomic_t outlives = 0;

void endAtOnce(int) { _exit(0); }
void onServerDeath(int) {
  if (outlives == 0) _exit(0);
}

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
  --copier.connections;
}

void begin(Copier& copier, Descriptor socket) {
  ++copier.connections;
  try {
    std::thread(serveConnection, std::ref(copier), std::move(socket)).detach();
  } catch (...) {
    --copier.connections;
    throw;
  }
}

// The server's next life, if that is what has come to the door.
bool comeBack(Copier& copier, WorkerProcess& process) {
  std::array<capnp::word, kMostRoom / sizeof(capnp::word)> room{};
  const auto received =
      receiveWithDescriptors(copier.door, std::as_writable_bytes(std::span(room)), MSG_DONTWAIT | MSG_TRUNC);
  std::vector<Descriptor> descriptors;
  for (int descriptor : received.descriptors) descriptors.emplace_back(descriptor);
  if (!received.whole || received.bytes <= 0 || static_cast<size_t>(received.bytes) > sizeof room ||
      descriptors.size() != 1 || !isControlSocket(descriptors[0]))
    return false;
  try {
    capnp::FlatArrayMessageReader reader(
        kj::arrayPtr(room.data(), static_cast<size_t>(received.bytes) / sizeof(capnp::word)));
    const auto order = reader.getRoot<schema::WorkerOrder>();
    if (!order.isAdopt()) return false;
    copier.store->setRoom(order.getAdopt().getBudgetBytes(), order.getAdopt().getFolder().cStr());
  } catch (const kj::Exception& error) {
    GPUPOOL_WARNING("what came to the door is no server: %s", error.getDescription().cStr());
    return false;
  }
  if (dup3(descriptors[0], kControlDescriptor, O_CLOEXEC) < 0) return false;
  return process.reportReady(copier.driver->path());
}

// The server is gone. True: its next life is here.
bool awaitServer(Copier& copier, WorkerProcess& process) {
  if (copier.door < 0) return false;
  const auto until = std::chrono::steady_clock::now() + copier.away + kWorkersFirst;
  while (copier.connections != 0 && std::chrono::steady_clock::now() < until) {
    pollfd waiting{copier.door, POLLIN, 0};
    if (poll(&waiting, 1, kLookMs) > 0 && comeBack(copier, process)) {
      GPUPOOL_INFO("what is kept goes on under the server's next life");
      return true;
    }
  }
  return false;
}

enum class Heard { order, stop, death };

Heard obey(Copier& copier, std::span<capnp::word> room) {
  const auto received = receiveWithDescriptors(kControlDescriptor, std::as_writable_bytes(room));
  std::vector<Descriptor> descriptors;
  descriptors.reserve(received.descriptors.size());
  for (int descriptor : received.descriptors) descriptors.emplace_back(descriptor);
  // It has died with reports unread; what it ordered before comes next, and then the end.
  if (received.bytes < 0 && errno == ECONNRESET) return Heard::order;
  if (received.bytes <= 0) return Heard::death;
  try {
    const size_t words = static_cast<size_t>(received.bytes) / sizeof(capnp::word);
    capnp::FlatArrayMessageReader reader(kj::arrayPtr(room.data(), received.whole ? words : 0));
    const auto order = reader.getRoot<schema::WorkerOrder>();
    if (order.isStop()) return Heard::stop;
    if (order.isServe() && descriptors.size() == 1) {
      begin(copier, std::move(descriptors.front()));
      return Heard::order;
    }
    if (order.isOutlive() && descriptors.size() == 1) {
      copier.door = std::move(descriptors.front());
      copier.away = std::chrono::milliseconds(order.getOutlive());
      outlives = 1;
      return Heard::order;
    }
    GPUPOOL_ERROR("an order of the server is none for a copier");
  } catch (const kj::Exception& error) {
    GPUPOOL_ERROR("an order of the server is malformed: %s", error.getDescription().cStr());
  } catch (const std::exception& error) {
    GPUPOOL_ERROR("a worker's connection cannot be served: %s", error.what());
  }
  return Heard::order;
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
  signal(kServerDiedSignal, onServerDeath);
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
  for (Heard heard = Heard::order; heard != Heard::stop;) {
    heard = obey(*copier, room);
    if (heard == Heard::death && !awaitServer(*copier, process)) break;
  }
  // Connections' threads may be inside the driver: the process's end ends them, and frees everything.
  _exit(0);
}

}  // namespace gpupool::server
