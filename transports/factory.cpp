// Transports by name: which code stands behind each name of base/transport_names.h.

#include <unistd.h>

#include <cstdlib>
#include <iterator>
#include <stdexcept>

#include "base/transport_names.h"
#include "transports/faulty.h"
#include "transports/implementations.h"

namespace gpupool::transport {
namespace {

using Make = std::unique_ptr<Connection> (*)(int bootstrap, const Options& options);

struct Implementation {
  std::string_view name;
  Make accept;   // by the worker, which listens where the client is not on its host
  Make connect;  // by the client
  void (*load)() = nullptr;
};
constexpr Implementation kImplementations[] = {
    {"shm", acceptShm, connectShm},
    {"ucx", acceptUcx, connectUcx, loadUcx},
};

consteval bool allNamed() {
  if (std::size(kImplementations) != std::size(kTransports)) return false;
  for (const Implementation& one : kImplementations) {
    bool named = false;  // not findTransport: gcc's UBSan lets no constant expression compare its pointer
    for (const TransportFacts& facts : kTransports) named = named || facts.name == one.name;
    if (!named) return false;
  }
  return true;
}
static_assert(allNamed(), "the tables of base/transport_names.h and of this file name the same transports");

std::unique_ptr<Connection> make(const std::string& transport, Make Implementation::* side, int bootstrap,
                                 const Options& options) {
  for (const Implementation& one : kImplementations)
    if (one.name == transport) return (one.*side)(bootstrap, options);
  ::close(bootstrap);
  throw std::runtime_error("transport '" + transport + "' does not exist; use " + transportChoices(" or "));
}

}  // namespace

NetworkWire wireNamed(const std::string& name) {
  if (name == "auto") return NetworkWire::automatic;
  if (name == "tcp") return NetworkWire::tcp;
  if (name == "rdma") return NetworkWire::rdma;
  throw std::runtime_error("a network's wire is 'auto', 'tcp' or 'rdma', not '" + name + "'");
}

void load(const std::string& transport) {
  for (const Implementation& one : kImplementations)
    if (one.name == transport && one.load != nullptr) one.load();
}

std::unique_ptr<Connection> accept(const std::string& transport, int bootstrap, const Options& options) {
  return make(transport, &Implementation::accept, bootstrap, options);
}

std::unique_ptr<Connection> connect(const std::string& transport, int bootstrap, const Options& options) {
  const char* faults = std::getenv("GPUPOOL_FAULTS");
  if (faults == nullptr || *faults == '\0')
    return make(transport, &Implementation::connect, bootstrap, options);
  Faults wanted;
  try {
    wanted = parseFaults(faults);
  } catch (...) {
    ::close(bootstrap);
    throw;
  }
  return faulty(make(transport, &Implementation::connect, bootstrap, options), wanted);
}

}  // namespace gpupool::transport
