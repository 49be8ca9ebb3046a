#include "server/worker/session_state.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "schema/rows.h"
#include "server/worker/device_stream.h"
#include "server/worker/hindrances.h"

namespace gpupool::server {
namespace {

using schema::SessionRecord;

capnp::Data::Reader asData(std::span<const std::byte> bytes) {
  return capnp::Data::Reader(reinterpret_cast<const kj::byte*>(bytes.data()), bytes.size());
}

void writeEntries(SessionRecord::Builder out, const std::vector<Record::Entry>& entries) {
  auto list = out.initEntries(static_cast<unsigned>(entries.size()));
  for (unsigned i = 0; i < list.size(); ++i) {
    const Record::Entry& entry = entries[i];
    list[i].setFrame(asData(std::as_bytes(std::span(&entry.frame, 1))));
    list[i].setArguments(asData(entry.arguments));
    list[i].setOutputs(asData(entry.outputs));
    auto names = list[i].initNames(static_cast<unsigned>(entry.names.size()));
    for (unsigned n = 0; n < names.size(); ++n) names.set(n, entry.names[n]);
  }
}

void writeMemory(SessionRecord::Builder out, Space& space) {
  const auto pieces = space.describe();
  auto list = out.initPieces(static_cast<unsigned>(pieces.size()));
  for (unsigned i = 0; i < list.size(); ++i) {
    list[i].setDevice(pieces[i].device);
    list[i].setBytes(pieces[i].bytes);
    list[i].setName(pieces[i].name);
    auto mappings = list[i].initMappings(static_cast<unsigned>(pieces[i].mappings.size()));
    for (unsigned m = 0; m < mappings.size(); ++m) {
      const Space::MappingState& mapping = pieces[i].mappings[m];
      mappings[m].setAddress(mapping.address);
      mappings[m].setOfClient(mapping.ofClient);
      auto access = mappings[m].initAccess(static_cast<unsigned>(mapping.access.size()));
      unsigned a = 0;
      for (const auto& [device, flags] : mapping.access) {
        access[a].setDevice(device);
        access[a++].setFlags(static_cast<uint32_t>(flags));
      }
    }
  }
  const auto peers = space.peers();
  auto bits = out.initPeers(static_cast<unsigned>(peers.size()));
  for (unsigned d = 0; d < bits.size(); ++d) bits.set(d, peers[d]);
}

void writeWhatFor(Session& session, SessionRecord::Builder out) {
  const Driver& driver = session.driver();
  int version = 0;
  driver.cuDriverGetVersion(&version);
  out.setRowsHash(schema::rowsHash());
  out.setFormat(schema::STATE_FORMAT);
  out.setDriverVersion(version);
  out.setSoftwareDriver(driver.software());
  out.setSpace(static_cast<uint32_t>(session.space().reserved()));
  out.setContextAhead(session.contextAhead());
  out.setWordsBytes(session.views().words()->size());
  out.setStagingBytes(session.views().staging()->size());
  const auto& devices = session.objects().devices();
  auto list = out.initDevices(static_cast<unsigned>(devices.size()));
  for (unsigned d = 0; d < list.size(); ++d) {
    char name[256] = {};
    driver.cuDeviceGetName(name, sizeof name - 1, devices[d]);
    list[d].setName(name);
  }
}

void writeNumbers(Session& session, SessionRecord::Builder out) {
  const Session::Numbers numbers = session.numbers();
  out.setLastFrame(numbers.lastFrame);
  out.setLastAside(numbers.lastAside);
  out.setCompleted(numbers.completed);
  out.setEffects(numbers.effects);
  const auto named = session.objects().named();
  auto counts = out.initNamed(static_cast<unsigned>(named.size()));
  for (unsigned kind = 0; kind < counts.size(); ++kind) counts.set(kind, named[kind]);
}

std::string sendContents(Session& session, StateSocket& socket, const Contents& contents) {
  return readContents(session, contents, [&](const std::string&, std::span<const std::byte> bytes) {
    return socket.sendContent(bytes) ? "" : socket.error();
  });
}

std::string writeImages(Session& session, SessionRecord::Builder out) {
  const auto pending = session.images().pending();
  auto list = out.initImages(static_cast<unsigned>(pending.size()));
  for (unsigned i = 0; i < list.size(); ++i) {
    if (pending[i].arriving) return "a code image of the program is on its way";
    list[i].setName(asData(std::as_bytes(std::span(&pending[i].name, 1))));
    list[i].setLoads(pending[i].loads);
    list[i].setHere(pending[i].here);
  }
  return "";
}

std::vector<int> descriptorsOfPages(Session& session) {
  return {session.views().words()->descriptor(), session.views().staging()->descriptor()};
}

std::string sendDescriptors(Session& session, StateSocket& socket, CopierLink* link) {
  std::vector<int> descriptors;
  if (session.record().ahead() == 0) descriptors = descriptorsOfPages(session);
  if (link != nullptr) descriptors.push_back(link->descriptor());
  for (const auto& [address, memory] : session.space().hostPieces())
    descriptors.push_back(memory->descriptor());
  return socket.sendDescriptors(descriptors) ? "" : socket.error();
}

// Of memory that stays here until the client has gone.
std::string sendPieces(Session& session, StateSocket& socket) {
  const Space& space = session.space();
  session.makeAnyCurrent();
  for (size_t at = 0; at < space.pieces();) {
    std::vector<Descriptor> owners;
    std::vector<int> descriptors;
    for (; at < space.pieces() && descriptors.size() < kMostInCrossing; ++at) {
      owners.emplace_back(space.exportPiece(at));
      if (owners.back() < 0) return "a piece of the device's memory cannot be exported";
      descriptors.push_back(owners.back());
    }
    if (!socket.sendDescriptors(descriptors)) return socket.error();
  }
  return "";
}

bool hearSequence(StateSocket& socket, uint32_t& sequence) {
  if (socket.receive(std::as_writable_bytes(std::span(&sequence, 1)))) return true;
  sequence += 1u << 20;  // whatever it said: far behind that
  return false;
}

void writeHost(Session& session, SessionRecord::Builder out) {
  const auto pieces = session.space().hostPieces();
  auto host = out.initHost(static_cast<unsigned>(pieces.size()));
  unsigned at = 0;
  for (const auto& [address, memory] : pieces) {
    host[at].setAddress(address);
    host[at].setContext(session.objects().known(session.space().hostContext(address)));
    host[at++].setBytes(memory->size());
  }
  const auto mirrors = session.mirrors();
  auto bases = out.initMirrors(static_cast<unsigned>(mirrors.size()));
  at = 0;
  for (const auto& [address, mirror] : mirrors) {
    bases[at].setAddress(address);
    bases[at++].setBase(asData(mirror.base()));
  }
}

void writeContents(const Contents& contents, SessionRecord::Builder out) {
  auto names = out.initVariables(static_cast<unsigned>(contents.variables.size()));
  for (unsigned i = 0; i < names.size(); ++i) {
    const Variable& variable = contents.variables[i];
    names[i].setOwner(variable.owner);
    names[i].setContext(variable.context);
    names[i].setName(variable.name);
    names[i].setAddress(variable.address);
    names[i].setBytes(variable.bytes);
  }
  auto images = out.initArrays(static_cast<unsigned>(contents.arrays.size()));
  for (unsigned i = 0; i < images.size(); ++i) {
    const ArrayState& array = contents.arrays[i];
    images[i].setArray(array.id);
    images[i].setContext(array.context);
    images[i].setLevels(array.levels);
    images[i].setBytes(array.bytes);
  }
}

void writeTimes(Session& session, SessionRecord::Builder out) {
  const auto times = session.eventTimes().measure(session);
  auto events = out.initEvents(static_cast<unsigned>(times.size()));
  for (unsigned i = 0; i < events.size(); ++i) {
    events[i].setEvent(times[i].event);
    events[i].setContext(times[i].context);
    events[i].setAgoMs(times[i].agoMs);
  }
  out.setCutBootTimeNs(bootTimeNs());
}

void writeDigests(const Digests& seen, SessionRecord::Builder out) {
  auto list = out.initDigests(static_cast<unsigned>(seen.size()));
  unsigned at = 0;
  for (const auto& [name, digest] : seen) {
    list[at].setName(name);
    list[at++].setDigest(asData(digest));
  }
}

bool sendRecord(capnp::MessageBuilder& message, StateSocket& socket) {
  const auto words = capnp::messageToFlatArray(message);
  const auto bytes = std::as_bytes(std::span(words.begin(), words.size()));
  return socket.sendBlock(bytes) && socket.send(contentDigest(bytes));
}

// ---- ahead

// Calls that look neither at memory nor at what others have queued.
bool goesAhead(uint32_t call) {
  static const std::set<uint32_t> calls = {
      schema::RowOf<"cuDevicePrimaryCtxSetFlags_v2">::id,
      schema::RowOf<"cuDevicePrimaryCtxRetain">::id,
      schema::RowOf<"cuCtxCreate_v2">::id,
      schema::RowOf<"cuCtxSetLimit">::id,
      schema::RowOf<"cuCtxSetCacheConfig">::id,
      schema::RowOf<"cuCtxEnablePeerAccess">::id,
      schema::RowOf<"cuCtxDisablePeerAccess">::id,
      schema::RowOf<"cuStreamCreateWithPriority">::id,
      schema::RowOf<"cuStreamDestroy_v2">::id,
      schema::RowOf<"cuEventCreate">::id,
      schema::RowOf<"cuEventDestroy_v2">::id,
      schema::RowOf<"sessionModuleLoad">::id,
      schema::RowOf<"cuModuleUnload">::id,
      schema::RowOf<"cuModuleGetFunction">::id,
      schema::RowOf<"cuModuleGetGlobal_v2">::id,
      schema::RowOf<"sessionLibraryLoad">::id,
      schema::RowOf<"cuLibraryUnload">::id,
      schema::RowOf<"cuLibraryGetKernel">::id,
      schema::RowOf<"cuLibraryGetModule">::id,
      schema::RowOf<"cuLibraryGetGlobal">::id,
      schema::RowOf<"cuLibraryGetManaged">::id,
      schema::RowOf<"sessionLinkCreate">::id,
      schema::RowOf<"sessionLinkAdd">::id,
      schema::RowOf<"sessionLinkComplete">::id,
      schema::RowOf<"cuLinkDestroy">::id,
      schema::RowOf<"cuFuncLoad">::id,
      schema::RowOf<"cuKernelGetFunction">::id,
      schema::RowOf<"sessionFunctionInfo">::id,
      schema::RowOf<"cuFuncSetAttribute">::id,
      schema::RowOf<"cuKernelSetAttribute">::id,
      schema::RowOf<"cuFuncSetCacheConfig">::id,
      schema::RowOf<"cuKernelSetCacheConfig">::id,
      schema::RowOf<"cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags">::id,
      schema::RowOf<"cuOccupancyAvailableDynamicSMemPerBlock">::id,
      schema::RowOf<"sessionLaunchAttributes">::id,  // asks how many clusters fit
      schema::RowOf<"sessionGreenCreate">::id,
      schema::RowOf<"cuGreenCtxStreamCreate">::id,
      schema::RowOf<"cuGreenCtxDestroy">::id,
      schema::RowOf<"cuArrayCreate_v2">::id,
      schema::RowOf<"cuArray3DCreate_v2">::id,
      schema::RowOf<"cuArrayDestroy">::id,
      schema::RowOf<"cuMipmappedArrayCreate">::id,
      schema::RowOf<"cuMipmappedArrayGetLevel">::id,
      schema::RowOf<"cuMipmappedArrayDestroy">::id,
  };
  return calls.contains(call);
}

// ---- the stream

// The other worker may ask for what the record names, and for each once.
std::string sendImages(Session& session, StateSocket& socket, std::vector<schema::ImageName> may,
                       ParallelSockets* parallel) {
  using Offer = ParallelSockets::Offer;
  static_assert(sizeof(Offer) < sizeof(schema::ImageName));
  std::vector<std::byte> asked;
  const size_t most = may.size() * sizeof(schema::ImageName) + (parallel != nullptr ? sizeof(Offer) : 0);
  if (!socket.receiveBlock(asked, most)) return socket.error();
  if (parallel != nullptr && asked.size() % sizeof(schema::ImageName) == sizeof(Offer)) {
    Offer offer;
    std::memcpy(&offer, asked.data() + asked.size() - sizeof offer, sizeof offer);
    if (!parallel->connect(socket, offer)) return socket.error();
  }
  for (size_t at = 0; at + sizeof(schema::ImageName) <= asked.size(); at += sizeof(schema::ImageName)) {
    schema::ImageName name;
    std::memcpy(&name, asked.data() + at, sizeof name);
    const auto known =
        std::find_if(may.begin(), may.end(), [&](const auto& one) { return sameImage(one, name); });
    if (known == may.end()) return "the other worker asks for code that is not the session's";
    may.erase(known);
    const auto image = session.images().find(name);
    if (image == nullptr) return "a code image of the program is not in the server's cache any more";
    const bool sent = socket.send(image->bytes());
    image->settle();
    if (!sent) return socket.error();
  }
  return "";
}

// The program writes memory that it shares with this worker whenever it likes: what is sent, and its
// checksum, are of one copy.
bool sendShared(StateSocket& socket, std::span<const std::byte> bytes) {
  std::vector<std::byte> part;
  for (; !bytes.empty(); bytes = bytes.subspan(part.size())) {
    const auto from = bytes.first(std::min(StateSocket::kPartBytes, bytes.size()));
    part.assign(from.begin(), from.end());
    if (!socket.sendContent(part)) return false;
  }
  return true;
}

std::string sendMemory(Session& session, StateSocket& socket, ParallelSockets& parallel) {
  const auto send = [&](const transport::SharedMemory& memory) {
    const std::span<const std::byte> bytes{memory.data(), memory.size()};
    return session.mapsMemory() ? sendShared(socket, bytes) : socket.sendContent(bytes);
  };
  bool sent = send(*session.views().words()) && send(*session.views().staging());
  for (const auto& [address, memory] : session.space().hostPieces()) sent = sent && send(*memory);
  return sent ? sendDevices(session, socket, parallel) : socket.error();
}

}  // namespace

std::string describeSession(Session& session, const Digests& seen, SessionRecord::Builder out,
                            Contents& contents) {
  if (const auto reasons = hindrances(session); !reasons.empty()) return reasons.front();
  if (std::string why = findContents(session, contents); !why.empty()) return why;
  writeWhatFor(session, out);
  writeNumbers(session, out);
  writeEntries(out, session.record().entries());
  out.setWent(static_cast<uint32_t>(session.record().ahead()));
  if (std::string why = writeImages(session, out); !why.empty()) return why;
  writeMemory(out, session.space());
  writeHost(session, out);
  writeContents(contents, out);
  writeTimes(session, out);
  writeDigests(seen, out);
  return "";
}

std::string sendAhead(Session& session, StateSocket& socket, ParallelSockets* parallel, size_t& entries) {
  if (const auto reasons = hindrances(session); !reasons.empty()) return reasons.front();
  const bool first = session.record().ahead() == 0;
  const auto going = session.record().goAhead(goesAhead);
  entries = going.size();
  if (entries == 0) return "";
  capnp::MallocMessageBuilder message;
  auto out = message.initRoot<SessionRecord>();
  writeWhatFor(session, out);
  out.setFormat(schema::AHEAD_FORMAT);
  out.setAhead(true);
  writeEntries(out, going);
  if (parallel != nullptr) {
    const std::string why = streamRecord(session, socket, message, parallel);
    return why.empty() ? socket.hearAnswer() : hearRefusal(socket, why);
  }
  uint32_t sequence = 0;  // nobody has spoken to the copier
  const bool sent =
      sendRecord(message, socket) && (!first || socket.sendDescriptors(descriptorsOfPages(session)));
  return sent && hearSequence(socket, sequence) ? socket.hearAnswer() : socket.error();
}

std::string hearRefusal(StateSocket& socket, const std::string& why) {
  if (socket.error().empty()) return why;
  socket.forgetError();
  const std::string said = socket.hearAnswer();
  return said.empty() ? why : said;
}

// A worker whose session shares memory with its client can connect to nobody (walls::refuseNetwork).
std::string streamRecord(Session& session, StateSocket& socket, capnp::MessageBuilder& message,
                         ParallelSockets* parallel) {
  auto out = message.getRoot<SessionRecord>();
  const bool asks = parallel != nullptr && !parallel->asked() && !socket.canOffer() && !session.mapsMemory();
  if (asks) {
    parallel->ask();
    out.setParallel(ParallelSockets::wanted());
  }
  std::string why = sendRecord(message, socket) ? socket.hearOffer() : socket.error();
  if (!why.empty()) return why;
  return sendImages(session, socket, imagesOf(out.asReader()), asks ? parallel : nullptr);
}

std::string sendState(Session& session, StateSocket& socket, CopierLink* link, bool direct,
                      uint32_t& sequence, const Digests& seen) {
  Contents contents;
  capnp::MallocMessageBuilder message;
  auto out = message.initRoot<SessionRecord>();
  if (std::string why = describeSession(session, seen, out, contents); !why.empty()) return why;
  if (link != nullptr) out.setCopierSequence(sequence = link->sequence());
  const auto& devices = session.objects().devices();
  if (direct && link != nullptr) {
    auto left = out.initLeft(static_cast<unsigned>(devices.size()));
    for (unsigned d = 0; d < left.size(); ++d) left.set(d, session.ordinal(d));
  }
  if (!sendRecord(message, socket)) return socket.error();
  std::string why = sendDescriptors(session, socket, link);
  if (why.empty() && direct && link != nullptr) why = sendPieces(session, socket);
  if (why.empty()) why = sendContents(session, socket, contents);
  if (!why.empty()) {
    // A worker that cannot rebuild the session has said so, and takes no more. One that waits for more is
    // told that nothing follows: what it has said to the copier must be known.
    if (socket.error().empty()) socket.endSending();
    socket.forgetError();
    const std::string said = hearSequence(socket, sequence) ? socket.hearAnswer() : "";
    return said.empty() || said == kOtherEnded ? why : said;
  }
  return hearSequence(socket, sequence) ? socket.hearAnswer() : socket.error();
}

std::string streamState(Session& session, StateSocket& socket, ParallelSockets& parallel, bool& accepted,
                        const Digests& seen) {
  Contents contents;
  capnp::MallocMessageBuilder message;
  auto out = message.initRoot<SessionRecord>();
  if (std::string why = describeSession(session, seen, out, contents); !why.empty()) return why;
  std::string why = streamRecord(session, socket, message, &parallel);
  if (why.empty()) why = socket.hearAnswer();
  accepted = why.empty();
  if (why.empty()) why = sendMemory(session, socket, parallel);
  if (why.empty()) why = sendContents(session, socket, contents);
  return why.empty() ? socket.hearAnswer() : hearRefusal(socket, why);
}

uint64_t bootTimeNs() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace gpupool::server
