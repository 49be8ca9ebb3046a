#include "server/front/inventory.h"

#include "schema/convert.h"
#include "server/front/worker_child.h"

namespace gpupool::server {
namespace {

kj::Exception failure(const std::string& text) {
  return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str("inventory: ", text));
}

Inventory read(schema::WorkerReport::Reader report) {
  Inventory inventory;
  inventory.driver = report.getDriver().cStr();
  inventory.rowsHash = report.getRowsHash();
  for (auto device : report.getDevices()) {
    inventory.devices.push_back(schema::read(device));
    if (inventory.devices.back().uuid.size() != 16)
      kj::throwFatalException(failure("a device without a uuid of 16 bytes"));
  }
  if (inventory.devices.empty()) kj::throwFatalException(failure(inventory.driver + " finds no device"));
  return inventory;
}

}  // namespace

kj::Promise<Inventory> takeInventory(kj::UnixEventPort& port, kj::Timer& timer, const WorkerProgram& program,
                                     const std::string& driver, kj::Duration bound) {
  std::vector<std::string> arguments{"--inventory"};
  if (!driver.empty()) arguments.insert(arguments.end(), {"--driver", driver});
  return kj::evalNow([&] {
    auto child = WorkerChild::start(port, program, arguments);
    WorkerChild& current = *child;
    auto answered =
        current.receive().then([&current](kj::Maybe<kj::Own<WorkerMessage>> maybe) -> kj::Promise<Inventory> {
          KJ_IF_MAYBE (message, maybe) {
            const auto report = (*message)->get();
            if (report.isFailed()) return failure(report.getFailed().cStr());
            if (!report.isDevices()) return failure("the worker sent something else");
            return read(report);
          }
          return current.exited().then([](const WorkerChild::Exit& exit) -> kj::Promise<Inventory> {
            return failure("the worker " + exit.text + " without answering");
          });
        });
    // Wait for the process as well: its device memory is free before the first worker starts.
    auto ended = timer.timeoutAfter(bound, kj::mv(answered)).then([&current](Inventory inventory) {
      current.kill();
      return current.exited().then(
          [inventory = std::move(inventory)](const WorkerChild::Exit&) { return inventory; });
    });
    return ended.attach(kj::mv(child));
  });
}

}  // namespace gpupool::server
