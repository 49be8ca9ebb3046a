// Transports by name: the one place that lists them.

#include <unistd.h>

#include <cstdlib>
#include <stdexcept>

#include "transports/transport.h"

namespace gpupool::transport {

namespace {

[[noreturn]] void refuse(const std::string& transport, int bootstrap) {
  ::close(bootstrap);
  throw std::runtime_error("transport '" + transport + "' does not exist; there are 'shm' and 'ucx'");
}

std::unique_ptr<Connection> connectPlain(const std::string& transport, int bootstrap,
                                         const Options& options) {
  if (transport == "shm") return connectShm(bootstrap, options);
  if (transport == "ucx") return connectUcx(bootstrap, options);
  refuse(transport, bootstrap);
}

}  // namespace

NetworkWire wireNamed(const std::string& name) {
  if (name == "auto") return NetworkWire::automatic;
  if (name == "tcp") return NetworkWire::tcp;
  if (name == "rdma") return NetworkWire::rdma;
  throw std::runtime_error("a network's wire is 'auto', 'tcp' or 'rdma', not '" + name + "'");
}

std::unique_ptr<Connection> accept(const std::string& transport, int bootstrap, const Options& options) {
  if (transport == "shm") return acceptShm(bootstrap, options);
  if (transport == "ucx") return acceptUcx(bootstrap, options);
  refuse(transport, bootstrap);
}

std::unique_ptr<Connection> connect(const std::string& transport, int bootstrap, const Options& options) {
  const char* faults = std::getenv("GPUPOOL_FAULTS");
  if (faults != nullptr && *faults != '\0') {
    Faults wanted;
    try {
      wanted = parseFaults(faults);
    } catch (...) {
      ::close(bootstrap);
      throw;
    }
    return faulty(connectPlain(transport, bootstrap, options), wanted);
  }
  return connectPlain(transport, bootstrap, options);
}

}  // namespace gpupool::transport
