#include "server/front/server_state.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/log.h"
#include "base/write_all.h"
#include "schema/convert.h"
#include "schema/store.capnp.h"

namespace gpupool::server {
ServerState StateFile::read() {
  // Of a server that was killed while it wrote.
  if (!path_.empty()) unlink((path_ + ".new").c_str());
  const kj::AutoCloseFd file(path_.empty() ? -1 : open(path_.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return {};
  ServerState state;
  try {
    capnp::StreamFdMessageReader reader(file.get());
    const auto stored = reader.getRoot<schema::StoredServer>();
    for (auto device : stored.getDevices())
      state.epochs[schema::bytes(device.getUuid())] = device.getHighestEpoch();
    if (stored.getBootId() == bootId_.c_str()) {
      for (auto worker : stored.getWorkers()) {
        StoredWorker one{
            static_cast<pid_t>(worker.getPid()), worker.getStartTicks(), schema::read(worker.getLease()), {}};
        for (auto uuid : worker.getDevices()) one.devices.push_back(schema::bytes(uuid));
        state.workers.push_back(std::move(one));
      }
      for (auto hold : stored.getHolds()) {
        const auto held = hold.getHeld();
        state.holds.push_back({schema::read(hold.getLease()), schema::read(held.getCheckpoint()),
                               schema::text(held.getFolder()), schema::text(held.getServer())});
      }
    }
  } catch (const kj::Exception& error) {
    GPUPOOL_WARNING("%s cannot be read, and is started anew: %s", path_.c_str(),
                    error.getDescription().cStr());
    return {};
  }
  stored_ = state;
  return state;
}

void StateFile::write(const ServerState& state) {
  if (path_.empty() || state == stored_) return;
  if (replace(state)) {
    stored_ = state;
    failed_ = false;
  } else if (!failed_) {
    GPUPOOL_WARNING("%s cannot be written: %s; a restart of this server would not know what runs now",
                    path_.c_str(), std::strerror(errno));
    failed_ = true;
  }
}

bool StateFile::replace(const ServerState& state) const {
  capnp::MallocMessageBuilder message;
  auto root = message.initRoot<schema::StoredServer>();
  root.setBootId(bootId_);
  auto devices = root.initDevices(static_cast<unsigned>(state.epochs.size()));
  unsigned at = 0;
  for (const auto& [uuid, epoch] : state.epochs) {
    devices[at].setUuid(schema::data(uuid));
    devices[at++].setHighestEpoch(epoch);
  }
  auto workers = root.initWorkers(static_cast<unsigned>(state.workers.size()));
  for (unsigned i = 0; i < workers.size(); ++i) {
    const StoredWorker& worker = state.workers[i];
    workers[i].setPid(static_cast<uint32_t>(worker.pid));
    workers[i].setStartTicks(worker.startTicks);
    schema::write(worker.lease, workers[i].initLease());
    auto uuids = workers[i].initDevices(static_cast<unsigned>(worker.devices.size()));
    for (unsigned d = 0; d < uuids.size(); ++d) uuids.set(d, schema::data(worker.devices[d]));
  }
  auto holds = root.initHolds(static_cast<unsigned>(state.holds.size()));
  for (unsigned i = 0; i < holds.size(); ++i) {
    schema::write(state.holds[i].lease, holds[i].initLease());
    auto held = holds[i].initHeld();
    schema::write(state.holds[i].checkpoint, held.initCheckpoint());
    held.setFolder(state.holds[i].folder);
    held.setServer(state.holds[i].server);
  }
  const auto words = capnp::messageToFlatArray(message);
  const auto flat = words.asChars();
  const std::string fresh = path_ + ".new";
  const kj::AutoCloseFd file(open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  return file.get() >= 0 && writeAll(file.get(), {flat.begin(), flat.size()}) &&
         rename(fresh.c_str(), path_.c_str()) == 0;
}

}  // namespace gpupool::server
