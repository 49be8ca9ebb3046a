#include "server/worker/rebuild.h"

#include <capnp/serialize.h>
#include <fcntl.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <iterator>
#include <numeric>

#include "base/log.h"
#include "schema/rows.h"
#include "server/worker/device_stream.h"
#include "server/worker/dispatch.h"
#include "server/worker/session_state.h"
#include "server/worker/suspender.h"

namespace gpupool::server {
namespace {

using schema::SessionRecord;

// Of a call that answers otherwise: the first value that differs.
std::string difference(std::span<const std::byte> now, std::span<const std::byte> then) {
  if (now.size() != then.size()) return "";
  for (size_t at = 0; at + 8 <= now.size(); at += 8) {
    uint64_t a = 0, b = 0;
    std::memcpy(&a, now.data() + at, sizeof a);
    std::memcpy(&b, then.data() + at, sizeof b);
    if (a != b) return ": " + hex(a) + " and not " + hex(b);
  }
  return "";
}

constexpr char kOtherContents[] = "the contents differ: ";  // tests/sessions/disturb looks for it
constexpr size_t kMostTried = 4096;                         // numbers of textures before the right one
constexpr uint32_t kMostLoads = 4096;
constexpr uint32_t kMostLevels = 32;
constexpr std::chrono::seconds kHearOut{10};  // of a part that is on its way, over a slow network

std::span<const std::byte> bytesOf(capnp::Data::Reader data) {
  return {reinterpret_cast<const std::byte*>(data.begin()), data.size()};
}

std::string nameOfDevice(const Driver& driver, CUdevice device) {
  char name[256] = {};
  driver.cuDeviceGetName(name, sizeof name - 1, device);
  return name;
}

// For what follows the record. Null: as bytes it comes, too.
std::shared_ptr<transport::SharedMemory> makeRoom(SessionRecord::Reader record) {
  constexpr uint64_t kParts = 10;  // three are compared and copied while others are filled
  const auto lengths = contentsOf(record);
  uint64_t bytes = 0;
  if (lengths) bytes = std::accumulate(lengths->begin(), lengths->end(), uint64_t{0});
  if (bytes == 0) return nullptr;
  try {
    return transport::SharedMemory::create(std::min(bytes, kParts * StateSocket::kPartBytes));
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace

struct Rebuild::State {
  std::vector<std::byte> bytes;
  std::unique_ptr<capnp::FlatArrayMessageReader> message;
  std::vector<Descriptor> host;
  uint64_t cameNs = 0;                  // bootTimeNs, when the record was here
  std::vector<schema::ImageName> sent;  // code that came with it, and is held until the session is rebuilt
  SessionRecord::Reader record() { return message->getRoot<SessionRecord>(); }
};

Rebuild::Rebuild(const Driver& driver, StateSocket& socket, bool stream, std::function<bool()> stopping)
    : driver_(driver),
      socket_(socket),
      stopping_(std::move(stopping)),
      stream_(stream),
      state_(std::make_unique<State>()) {}

Rebuild::~Rebuild() = default;

std::string Rebuild::judge() const {
  const auto record = state_->record();
  int version = 0;
  driver_.cuDriverGetVersion(&version);
  if (record.getRowsHash() != schema::rowsHash() || record.getFormat() != schema::STATE_FORMAT)
    return "the other worker is of another build of gpupool";
  if (record.getSoftwareDriver() != driver_.software() || record.getDriverVersion() != version)
    return "the other worker has another driver";
  if (record.getSpace() >= schema::kMaxSpaces) return "the other worker's record is damaged";
  return "";
}

std::string Rebuild::receive(HostPages& pages) {
  Digest digest{};
  if (!socket_.receiveBlock(state_->bytes, kMostRecordBytes) || !socket_.receive(digest))
    return socket_.error();
  if (contentDigest(state_->bytes) != digest) return kDamagedOnItsWay;
  if (stream_ && beginsAnew()) return "";
  if (state_->bytes.size() % sizeof(capnp::word) != 0) return "the other worker's record is damaged";
  capnp::ReaderOptions options;
  options.traversalLimitInWords = kMostRecordBytes / sizeof(capnp::word) * 4;
  try {
    state_->message = std::make_unique<capnp::FlatArrayMessageReader>(
        kj::arrayPtr(reinterpret_cast<const capnp::word*>(state_->bytes.data()),
                     state_->bytes.size() / sizeof(capnp::word)),
        options);
    if (std::string why = judge(); !why.empty()) return why;
    state_->cameNs = bootTimeNs();
    if (state_->record().getStagingBytes() != pages.staging->size() ||
        state_->record().getWordsBytes() != pages.words->size())
      return "the other worker is of another build of gpupool";
    return stream_ ? "" : receiveDescriptors(pages);
  } catch (const kj::Exception& e) {
    return std::string("the other worker's record is damaged: ") + e.getDescription().cStr();
  } catch (const std::exception& e) {
    return e.what();
  }
}

bool Rebuild::beginsAnew() const { return state_->bytes.empty(); }

unsigned Rebuild::contextAhead() const { return state_->record().getContextAhead(); }

std::string Rebuild::receiveDescriptors(HostPages& pages) {
  const auto record = state_->record();
  const bool pieces = record.getPieces().size() != 0;
  std::vector<Descriptor> first;
  if (!socket_.receiveDescriptors(first, 2 + pieces + record.getHost().size())) return socket_.error();
  const size_t staging = pages.staging->size();
  pages.words = transport::SharedMemory::adopt(first[0].release(), schema::kWordsBytes);
  pages.staging = transport::SharedMemory::adopt(first[1].release(), staging);
  pages.registeredIn = nullptr;
  if (pieces && record.getLeft().size() != 0) {
    link_ = std::make_unique<CopierLink>(std::move(first[2]), stopping_);
    link_->goOn(record.getCopierSequence());
  } else if (pieces) {
    std::vector<CopierPiece> planned;
    for (const auto piece : record.getPieces()) planned.push_back({piece.getDevice(), piece.getBytes()});
    link_ =
        CopierLink::takeOver(std::move(first[2]), stopping_, std::move(planned), record.getCopierSequence());
  }
  for (size_t i = 2 + pieces; i < first.size(); ++i) state_->host.push_back(std::move(first[i]));
  return "";
}

std::string Rebuild::make(Session& session) {
  if (stream_ && beginsAnew()) return "";
  try {
    if (stream_)
      if (std::string why = receiveImages(session); !why.empty()) return why;
    if (std::string why = makeMemory(session); !why.empty()) return why;
    if (std::string why = bringIn(session); !why.empty()) return why;
    session.space().setRepeating(true);
    std::string repeated = repeatCalls(session);
    session.space().setRepeating(false);
    if (!repeated.empty()) return repeated;
    if (stream_)
      if (std::string why = receiveMemory(session); !why.empty()) return why;
    if (std::string why = receiveContents(session); !why.empty()) return why;
    if (std::string why = adoptTimes(session); !why.empty()) return why;
    if (std::string why = offerImages(session); !why.empty()) return why;
    if (std::string why = compareContents(session); !why.empty()) return why;
    for (const schema::ImageName& name : state_->sent) session.images().take(name);
    const auto record = state_->record();
    std::vector<uint32_t> named;
    for (const uint32_t count : record.getNamed()) named.push_back(count);
    session.objects().setNamed(named);
    session.setNumbers(
        {record.getLastFrame(), record.getLastAside(), record.getCompleted(), record.getEffects()});
    return "";
  } catch (const kj::Exception& e) {
    return std::string("the other worker's record is damaged: ") + e.getDescription().cStr();
  } catch (const std::exception& e) {
    return e.what();
  }
}

std::string Rebuild::makeMemory(Session& session) {
  const auto record = state_->record();
  const auto devices = record.getDevices();
  if (devices.size() != session.objects().devices().size()) return "the other worker's record is damaged";
  for (unsigned d = 0; d < devices.size(); ++d) {
    const std::string here = nameOfDevice(driver_, session.objects().devices()[d]);
    if (here != devices[d].getName().cStr())
      return "the GPU is a " + here + ", not a " + devices[d].getName().cStr();
  }
  std::string why;
  if (session.space().reserve(1u << record.getSpace(), why) < 0) return why;
  std::vector<Space::PieceState> pieces;
  for (const auto from : record.getPieces()) {
    Space::PieceState& piece = pieces.emplace_back();
    piece.device = from.getDevice();
    piece.bytes = from.getBytes();
    piece.name = from.getName();
    for (const auto mapped : from.getMappings()) {
      Space::MappingState& mapping = piece.mappings.emplace_back();
      mapping.address = mapped.getAddress();
      mapping.ofClient = mapped.getOfClient();
      for (const auto access : mapped.getAccess())
        mapping.access[access.getDevice()] = static_cast<CUmemAccess_flags>(access.getFlags());
    }
  }
  std::vector<uint32_t> peers;
  for (const uint32_t bits : record.getPeers()) peers.push_back(bits);
  if (why = session.space().adopt(pieces, peers); !why.empty()) return why;
  const auto host = record.getHost();
  for (unsigned i = 0; i < host.size(); ++i) {
    const int descriptor = stream_ ? -1 : fcntl(state_->host[i], F_DUPFD_CLOEXEC, 3);
    if ((descriptor < 0 && !stream_) ||
        !session.space().adoptHost(host[i].getAddress(), descriptor, host[i].getBytes()))
      return "the session's pinned memory cannot be taken over";
  }
  if (host.size() != 0) session.registerHost();
  auto lock = session.holdMirrors();
  for (const auto mirror : record.getMirrors())
    session.mirror(mirror.getAddress()).apply(0, bytesOf(mirror.getBase()));
  return "";
}

// The memory comes before the calls: a texture, say, is made of memory that is there.
std::string Rebuild::bringIn(Session& session) {
  if (!stream_ && link_ == nullptr) return "";
  if (!stream_ && state_->record().getLeft().size() != 0) return bringAcross(session);
  if (!stream_) return bringPiecesIn(session, *link_);
  const CUresult made = session.space().comeBack();  // its bytes come later
  return made == CUDA_SUCCESS ? "" : "no memory for the session on its GPU: " + driver_.describe(made);
}

// The other worker still has it, on devices of which none is this session's.
std::string Rebuild::bringAcross(Session& session) {
  Space& space = session.space();
  if (const CUresult made = space.comeBack(); made != CUDA_SUCCESS)
    return "no memory for the session on its GPU: " + driver_.describe(made);
  const auto record = state_->record();
  const auto left = record.getLeft();
  std::vector<CopierCrossing> crossings;
  for (const auto piece : record.getPieces()) {
    if (piece.getDevice() >= left.size()) return "the other worker's record is damaged";
    crossings.push_back({left[piece.getDevice()], session.ordinal(piece.getDevice()),
                         static_cast<uint32_t>(piece.getBytes() / kCopierUnit)});
  }
  std::deque<Descriptor> came;
  const auto from = [&](size_t index) {
    std::vector<Descriptor> more;
    if (came.empty() &&
        !socket_.receiveDescriptors(more, std::min(kMostInCrossing, crossings.size() - index)))
      return -1;
    std::move(more.begin(), more.end(), std::back_inserter(came));
    const int descriptor = came.front().release();
    came.pop_front();
    return descriptor;
  };
  const std::string why =
      link_->across(crossings, from, [&](size_t index) { return space.exportPiece(index); });
  return socket_.error().empty() ? why : socket_.error();
}

// ---- of a stream

std::string Rebuild::receiveImages(Session& session) {
  for (const schema::ImageName& name : imagesOf(state_->record())) {
    if (session.images().offer(name))
      session.images().take(name);
    else
      state_->sent.push_back(name);
  }
  if (!socket_.answer("") || !socket_.sendBlock(std::as_bytes(std::span(state_->sent))))
    return socket_.error();
  for (const schema::ImageName& name : state_->sent)
    if (std::string why = receiveImage(session, name); !why.empty()) return why;
  return "";
}

// Hashed and kept as a client's own would be.
std::string Rebuild::receiveImage(Session& session, const schema::ImageName& name) {
  if (name.bytes == 0 || name.bytes > Images::kMostBytes) return "the other worker's record is damaged";
  std::vector<std::byte> bytes(std::min<uint64_t>(name.bytes, kImageAtOnce));
  for (uint64_t at = 0; at < name.bytes; at += bytes.size()) {
    bytes.resize(std::min<uint64_t>(name.bytes - at, bytes.size()));
    if (!socket_.receive(bytes)) return socket_.error();
    const CUresult status = session.images().append(name, at, bytes);
    if (status == CUDA_ERROR_INVALID_IMAGE) return kDamagedOnItsWay;
    if (status != CUDA_SUCCESS) return "no room for the code of the program";
  }
  return "";
}

std::string Rebuild::receiveMemory(Session& session) {
  if (!socket_.offerRoom(socket_.canOffer() ? makeRoom(state_->record()) : nullptr)) return socket_.error();
  const auto receive = [&](const transport::SharedMemory& memory) {
    return socket_.receiveContent({memory.data(), memory.size()});
  };
  bool received = receive(*session.views().words()) && receive(*session.views().staging());
  for (const auto& [address, memory] : session.space().hostPieces()) received = received && receive(*memory);
  return received ? DeviceStream(session).receive(socket_) : socket_.error();
}

std::string Rebuild::repeatCalls(Session& session) {
  const auto entries = state_->record().getEntries();
  for (unsigned i = 0; i < entries.size(); ++i)
    if (std::string why = repeatCall(session, i); !why.empty()) return why;
  return "";
}

std::string Rebuild::repeatCall(Session& session, size_t index) {
  const auto entry = state_->record().getEntries()[static_cast<unsigned>(index)];
  const auto frame = bytesOf(entry.getFrame()), arguments = bytesOf(entry.getArguments()),
             outputs = bytesOf(entry.getOutputs());
  Call call;
  if (frame.size() != sizeof call.frame) return "the other worker's record is damaged";
  std::memcpy(&call.frame, frame.data(), sizeof call.frame);
  call.bytes.assign(arguments.begin(), arguments.end());
  const Handler* handler = findHandler(call.frame.call);
  if (handler == nullptr || handler->aside) return "the other worker's record is damaged";
  const std::string name(handler->name);
  if (const auto image = imageNamed(call.frame.call, arguments))
    if (!session.images().offer(*image)) return name + ": the code is not in the server's cache (--cache)";
  std::vector<uint64_t> given, made;
  for (const uint64_t id : entry.getNames()) given.push_back(id);
  {
    Objects::Naming naming(made, given);
    call.status = session.makeCurrent(call.frame.context, &call.view);
    if (call.status == CUDA_SUCCESS) handler->serve(session, call);
  }
  GPUPOOL_DEBUG("repeats %llu %s -> %d", static_cast<unsigned long long>(call.frame.seq), name.c_str(),
                call.status);
  if (call.malformed != nullptr) return name + ": " + call.malformed;
  if (call.status != CUDA_SUCCESS) return name + " gives " + driver_.describe(call.status);
  if (made != given) return name + " makes other objects than it did";
  if (!handler->verified) return "";
  const auto out = call.out.span();
  if (std::equal(out.begin(), out.end(), outputs.begin(), outputs.end())) return "";
  return settleView(session, call, outputs);
}

// The driver gives textures and surfaces the lowest number that is free; what took a lower one has ended. In
// its place others are made until the number is right, and destroyed again.
std::string Rebuild::settleView(Session& session, Call& call, std::span<const std::byte> wanted) {
  const Handler* handler = findHandler(call.frame.call);
  const std::string name(handler->name);
  const bool texture = call.frame.call == schema::RowOf<"cuTexObjectCreate">::id;
  if (!texture && call.frame.call != schema::RowOf<"cuSurfObjectCreate">::id)
    return name + " answers other values than it did" + difference(call.out.span(), wanted);
  std::vector<uint64_t> others;
  bool found = false;
  while (!found && others.size() < kMostTried) {
    uint64_t value = 0;
    std::memcpy(&value, call.out.span().data(), sizeof value);
    others.push_back(value);
    call.out.clear();
    handler->serve(session, call);
    if (call.status != CUDA_SUCCESS) break;
    const auto out = call.out.span();
    found = std::equal(out.begin(), out.end(), wanted.begin(), wanted.end());
  }
  for (const uint64_t value : others) {
    Call end;
    end.frame = call.frame;
    end.frame.call =
        texture ? schema::RowOf<"cuTexObjectDestroy">::id : schema::RowOf<"cuSurfObjectDestroy">::id;
    end.bytes.resize(sizeof value);
    std::memcpy(end.bytes.data(), &value, sizeof value);
    findHandler(end.frame.call)->serve(session, end);
  }
  return found ? "" : name + " answers another value than it did";
}

// What the client has been told of code that it has not loaded yet holds here, too.
std::string Rebuild::offerImages(Session& session) {
  for (const auto image : state_->record().getImages()) {
    schema::ImageName name;
    const auto bytes = bytesOf(image.getName());
    if (bytes.size() != sizeof name || image.getLoads() > kMostLoads)
      return "the other worker's record is damaged";
    std::memcpy(&name, bytes.data(), sizeof name);
    for (uint32_t load = 0; load < image.getLoads(); ++load)
      if (!session.images().offer(name) && image.getHere())
        return "code is not in the server's cache (--cache)";
  }
  return "";
}

std::string Rebuild::adoptTimes(Session& session) {
  const auto record = state_->record();
  std::vector<EventTimes::Time> times;
  for (const auto event : record.getEvents())
    times.push_back({event.getEvent(), event.getContext(), event.getAgoMs()});
  // Another machine's clock tells nothing here.
  const uint64_t now = bootTimeNs(),
                 cut = stream_ ? state_->cameNs : std::min(record.getCutBootTimeNs(), now);
  const double gap = static_cast<double>(now - cut) / 1e6;
  const CUresult status = session.eventTimes().adopt(session, times, gap);
  return status == CUDA_SUCCESS ? "" : "events cannot be timed: " + driver_.describe(status);
}

std::string Rebuild::receiveContents(Session& session) {
  std::string why = receiveVariables(session);
  return why.empty() ? receiveArrays(session) : why;
}

std::string Rebuild::receiveVariables(Session& session) {
  std::vector<std::byte> bytes, again;
  for (const auto variable : state_->record().getVariables()) {
    const std::string name = variable.getName().cStr();
    CUdeviceptr address = 0;
    size_t size = 0;
    CUresult status = session.makeCurrent(variable.getContext());
    if (status != CUDA_SUCCESS || !findVariable(session, variable.getOwner(), name, address, size))
      return "variable " + name + " is not there";
    if (address != variable.getAddress() || size != variable.getBytes())
      return "variable " + name + " lies at another address than it did: " + hex(address) + " and not " +
             hex(variable.getAddress());
    bytes.resize(size);
    again.resize(size);
    if (!socket_.receiveContent(bytes)) return socket_.error();
    if (variable.getContext() == 0) {
      std::memcpy(reinterpret_cast<void*>(address), bytes.data(), size);
      continue;
    }
    status = driver_.cuMemcpyDtoH_v2(again.data(), address, size);
    // What is as the code has it is not written: it may be read-only.
    if (status == CUDA_SUCCESS && again != bytes)
      status = driver_.cuMemcpyHtoD_v2(address, bytes.data(), size);
    if (status != CUDA_SUCCESS) return "variable " + name + " cannot be written: " + driver_.describe(status);
  }
  return "";
}

std::string Rebuild::receiveArrays(Session& session) {
  std::vector<std::byte> bytes;
  for (const auto array : state_->record().getArrays()) {
    if (array.getLevels() > kMostLevels) return "the other worker's record is damaged";
    CUresult status = session.makeCurrent(array.getContext());
    const auto levels = levelsOf(driver_, session.objects(), array.getArray(), array.getLevels());
    uint64_t size = 0;
    for (CUarray level : levels) size += arrayBytes(driver_, level);
    if (status != CUDA_SUCCESS || size != array.getBytes()) return "an array has another shape than it had";
    bytes.resize(size);
    if (!socket_.receiveContent(bytes)) return socket_.error();
    size_t at = 0;
    for (CUarray level : levels) {
      const size_t part = arrayBytes(driver_, level);
      if (status == CUDA_SUCCESS)
        status = copyArray(driver_, level, std::span(bytes).subspan(at, part), false);
      at += part;
    }
    if (status != CUDA_SUCCESS) return "an array cannot be written: " + driver_.describe(status);
  }
  return "";
}

// Tests: all that the program will find is what the other worker had.
std::string Rebuild::compareContents(Session& session) {
  const auto theirs = state_->record().getDigests();
  if (theirs.size() == 0) return "";
  Contents contents;
  for (const auto one : state_->record().getVariables())
    contents.variables.push_back(
        {one.getOwner(), one.getContext(), one.getName().cStr(), one.getAddress(), one.getBytes()});
  for (const auto one : state_->record().getArrays())
    contents.arrays.push_back({one.getArray(), one.getContext(), one.getLevels(), one.getBytes()});
  Digests mine;
  if (std::string why = contentDigests(session, contents, !stream_, mine); !why.empty()) return why;
  for (const auto one : theirs) {
    const std::string name = one.getName().cStr();
    const auto found = mine.find(name);
    if (found == mine.end()) return std::string(kOtherContents) + name + " is not there";
    if (!std::ranges::equal(bytesOf(one.getDigest()), std::span(found->second)))
      return std::string(kOtherContents) + name + " is not what it was";
  }
  return mine.size() == theirs.size() ? "" : std::string(kOtherContents) + "there is more of it";
}

bool Rebuild::answer(const std::string& why) {
  if (!why.empty()) socket_.forgetError();  // it may be of what came, and the other worker hears what it was
  if (stream_) {
    const bool told = socket_.answer(why);
    if (why.empty()) return told;
    socket_.endSending();
    socket_.hearOut(kHearOut);
    return told;
  }
  const uint32_t sequence = link_ != nullptr ? link_->sequence() : 0;
  link_ = nullptr;
  return socket_.send(std::as_bytes(std::span(&sequence, 1))) && socket_.answer(why);
}

}  // namespace gpupool::server
