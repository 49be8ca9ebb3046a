#include "server/files/manifest.h"

#include <capnp/message.h>
#include <capnp/serialize.h>

#include <cstring>
#include <stdexcept>

#include "schema/checkpoint.capnp.h"
#include "schema/convert.h"

namespace gpupool::server {
namespace {

constexpr char kDamagedManifest[] = "its manifest is damaged";

void write(const Manifest::Session& from, schema::CheckpointSession::Builder to) {
  schema::write(from.session, to.initSession());
  to.setEpoch(from.epoch);
  to.setClientPid(from.clientPid);
  to.setCommand(from.command);
  to.setTransport(from.transport);
  to.setLastFrame(from.facts.lastFrame);
  to.setFile(from.file);
  to.setBytes(from.facts.bytes);
  to.setDigest(capnp::Data::Reader(reinterpret_cast<const kj::byte*>(from.facts.digest.data()),
                                   from.facts.digest.size()));
  to.setRowsHash(from.facts.rowsHash);
}

Manifest::Session read(schema::CheckpointSession::Reader from, const Manifest& manifest) {
  Manifest::Session to;
  to.session = schema::read(from.getSession());
  to.epoch = from.getEpoch();
  to.clientPid = from.getClientPid();
  to.command = schema::text(from.getCommand());
  to.transport = schema::text(from.getTransport());
  to.file = schema::text(from.getFile());
  to.facts.bytes = from.getBytes();
  to.facts.lastFrame = from.getLastFrame();
  to.facts.rowsHash = from.getRowsHash() != 0 ? from.getRowsHash() : manifest.rowsHash;
  to.facts.driverVersion = static_cast<int>(manifest.driverVersion);
  const auto digest = from.getDigest();
  if (digest.size() != to.facts.digest.size()) throw std::runtime_error(kDamagedManifest);
  std::memcpy(to.facts.digest.data(), digest.begin(), digest.size());
  return to;
}

Manifest read(schema::Checkpoint::Reader from) {
  if (from.getVersion() != schema::CHECKPOINT_VERSION)
    throw std::runtime_error("it is of another version of gpupool (checkpoint version " +
                             std::to_string(from.getVersion()) + ", not " +
                             std::to_string(schema::CHECKPOINT_VERSION) + ")");
  Manifest to;
  to.id = schema::read(from.getId());
  to.lease = schema::read(from.getLease());
  to.tenant = schema::text(from.getTenant());
  to.holder = schema::text(from.getHolder());
  to.server = schema::text(from.getServer());
  to.writtenS = from.getWrittenS();
  to.held = from.getHeld();
  to.rowsHash = from.getRowsHash();
  to.driverVersion = from.getDriverVersion();
  for (const auto device : from.getDevices())
    to.devices.push_back({schema::text(device.getName()), device.getSoftware(), device.getTotalBytes(),
                          device.getMemoryBytes()});
  for (const auto session : from.getSessions()) to.sessions.push_back(read(session, to));
  return to;
}

}  // namespace

std::vector<std::byte> encodeManifest(const Manifest& manifest) {
  capnp::MallocMessageBuilder message;
  auto out = message.initRoot<schema::Checkpoint>();
  out.setVersion(schema::CHECKPOINT_VERSION);
  schema::write(manifest.id, out.initId());
  schema::write(manifest.lease, out.initLease());
  out.setTenant(manifest.tenant);
  out.setHolder(manifest.holder);
  out.setServer(manifest.server);
  out.setWrittenS(manifest.writtenS);
  out.setHeld(manifest.held);
  out.setRowsHash(manifest.rowsHash);
  out.setDriverVersion(manifest.driverVersion);
  auto devices = out.initDevices(static_cast<unsigned>(manifest.devices.size()));
  for (unsigned i = 0; i < devices.size(); ++i) {
    devices[i].setName(manifest.devices[i].name);
    devices[i].setSoftware(manifest.devices[i].software);
    devices[i].setTotalBytes(manifest.devices[i].totalBytes);
    devices[i].setMemoryBytes(manifest.devices[i].memoryBytes);
  }
  auto sessions = out.initSessions(static_cast<unsigned>(manifest.sessions.size()));
  for (unsigned i = 0; i < sessions.size(); ++i) write(manifest.sessions[i], sessions[i]);
  const auto words = capnp::messageToFlatArray(message);
  const auto bytes = std::as_bytes(std::span(words.begin(), words.size()));
  std::vector<std::byte> file(bytes.begin(), bytes.end());
  const Digest digest = sha256(bytes);
  file.insert(file.end(), digest.begin(), digest.end());
  return file;
}

Manifest decodeManifest(std::span<const std::byte> bytes) {
  Digest digest{};
  if (bytes.size() < digest.size() || bytes.size() > kMostManifestBytes)
    throw std::runtime_error(kDamagedManifest);
  const auto body = bytes.first(bytes.size() - digest.size());
  std::memcpy(digest.data(), bytes.data() + body.size(), digest.size());
  if (body.size() % sizeof(capnp::word) != 0 || sha256(body) != digest)
    throw std::runtime_error(kDamagedManifest);
  std::vector<capnp::word> words(body.size() / sizeof(capnp::word));
  std::memcpy(words.data(), body.data(), body.size());
  try {
    capnp::FlatArrayMessageReader message(kj::arrayPtr(words.data(), words.size()));
    return read(message.getRoot<schema::Checkpoint>());
  } catch (const kj::Exception& e) {
    throw std::runtime_error(std::string(kDamagedManifest) + ": " + e.getDescription().cStr());
  }
}

}  // namespace gpupool::server
