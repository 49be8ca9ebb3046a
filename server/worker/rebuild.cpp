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
constexpr char kDamaged[] = "the other worker's record is damaged";
constexpr size_t kMostAhead = 16;                // records
constexpr size_t kSpareAhead = size_t{1} << 30;  // of device memory
constexpr size_t kMostTried = 4096;              // numbers of textures before the right one
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
  explicit State(std::function<bool()> stopping) : parallel(std::move(stopping)) {}
  struct Received {
    std::vector<std::byte> bytes;
    std::unique_ptr<capnp::FlatArrayMessageReader> message;
  };
  std::vector<Received> records;  // those that came ahead, of which entries count, and then the session's
  size_t servedRecords = 0;       // whose calls were served again
  unsigned servedEntries = 0;     // and of the one behind them
  uint64_t cameAhead = 0;         // entries
  uint64_t recordBytes = 0;       // of all records
  bool anew = false;              // there is no record, and the session begins anew
  std::vector<Descriptor> host;
  uint64_t cameNs = 0;                  // bootTimeNs, when the record was here
  std::vector<schema::ImageName> sent;  // code that came with it, and is held until the session is rebuilt
  ParallelSockets parallel;             // of a stream
  SessionRecord::Reader record() { return records.back().message->getRoot<SessionRecord>(); }
};

Rebuild::Rebuild(const Driver& driver, StateSocket& socket, bool stream, std::function<bool()> stopping)
    : driver_(driver),
      socket_(socket),
      stopping_(std::move(stopping)),
      stream_(stream),
      state_(std::make_unique<State>(stopping_)) {}

Rebuild::~Rebuild() = default;

std::string Rebuild::judge() const {
  const auto record = state_->record();
  int version = 0;
  driver_.cuDriverGetVersion(&version);
  const uint32_t format = record.getAhead() ? schema::AHEAD_FORMAT : schema::STATE_FORMAT;
  if (record.getRowsHash() != schema::rowsHash() || record.getFormat() != format)
    return "the other worker is of another build of gpupool";
  if (record.getSoftwareDriver() != driver_.software() || record.getDriverVersion() != version)
    return "the other worker has another driver";
  const bool fits =
      record.getAhead() ? state_->records.size() <= kMostAhead : record.getWent() == state_->cameAhead;
  if (record.getSpace() >= schema::kMaxSpaces || !fits) return kDamaged;
  return "";
}

std::string Rebuild::receive(HostPages& pages) {
  try {
    std::string why = receiveRecord();
    if (!why.empty() || beginsAnew()) return why;
    if (state_->record().getStagingBytes() != pages.staging->size() ||
        state_->record().getWordsBytes() != pages.words->size())
      return "the other worker is of another build of gpupool";
    return stream_ ? "" : receiveDescriptors(&pages);
  } catch (const kj::Exception& e) {
    return std::string(kDamaged) + ": " + e.getDescription().cStr();
  } catch (const std::exception& e) {
    return e.what();
  }
}

std::string Rebuild::receiveRecord() {
  State::Received received;
  Digest digest{};
  if (!socket_.receiveBlock(received.bytes, kMostRecordBytes - state_->recordBytes) ||
      !socket_.receive(digest))
    return socket_.error();
  state_->recordBytes += received.bytes.size();
  if (contentDigest(received.bytes) != digest) return kDamagedOnItsWay;
  state_->anew = stream_ && state_->records.empty() && received.bytes.empty();
  if (state_->anew) return "";
  if (received.bytes.size() % sizeof(capnp::word) != 0) return kDamaged;
  capnp::ReaderOptions options;
  options.traversalLimitInWords = kMostRecordBytes / sizeof(capnp::word) * 4;
  received.message = std::make_unique<capnp::FlatArrayMessageReader>(
      kj::arrayPtr(reinterpret_cast<const capnp::word*>(received.bytes.data()),
                   received.bytes.size() / sizeof(capnp::word)),
      options);
  state_->records.push_back(std::move(received));
  state_->cameNs = bootTimeNs();
  return judge();
}

bool Rebuild::beginsAnew() const { return state_->anew; }

unsigned Rebuild::contextAhead() const { return state_->record().getContextAhead(); }

// pages: with the first record. What else is passed comes with the last one.
std::string Rebuild::receiveDescriptors(HostPages* pages) {
  const auto record = state_->record();
  const bool last = !record.getAhead(), pieces = last && record.getPieces().size() != 0;
  const size_t before = pages != nullptr ? 2 : 0, host = last ? record.getHost().size() : 0;
  std::vector<Descriptor> came;
  if (!socket_.receiveDescriptors(came, before + pieces + host)) return socket_.error();
  if (pages != nullptr) {
    const size_t staging = pages->staging->size();
    pages->words = transport::SharedMemory::adopt(came[0].release(), schema::kWordsBytes);
    pages->staging = transport::SharedMemory::adopt(came[1].release(), staging);
    pages->registeredIn = nullptr;
  }
  if (pieces) takeLink(std::move(came[before]));
  for (size_t i = before + pieces; i < came.size(); ++i) state_->host.push_back(std::move(came[i]));
  return "";
}

// To the copier, which has the pieces or is to copy them.
void Rebuild::takeLink(Descriptor copier) {
  const auto record = state_->record();
  if (record.getLeft().size() != 0) {
    link_ = std::make_unique<CopierLink>(std::move(copier), stopping_);
    link_->goOn(record.getCopierSequence());
    return;
  }
  std::vector<CopierPiece> planned;
  for (const auto piece : record.getPieces()) planned.push_back({piece.getDevice(), piece.getBytes()});
  link_ = CopierLink::takeOver(std::move(copier), stopping_, std::move(planned), record.getCopierSequence());
}

std::string Rebuild::make(Session& session) {
  if (stream_ && beginsAnew()) return "";
  try {
    std::string why = begin(session);
    while (why.empty() && state_->record().getAhead()) {
      why = makeAhead(session);
      if (why.empty()) why = receiveRecord();
      if (why.empty() && !stream_ && !state_->record().getAhead()) why = receiveDescriptors(nullptr);
    }
    return why.empty() ? makeRest(session) : why;
  } catch (const kj::Exception& e) {
    return std::string(kDamaged) + ": " + e.getDescription().cStr();
  } catch (const std::exception& e) {
    return e.what();
  }
}

std::string Rebuild::begin(Session& session) {
  const auto record = state_->record();
  const auto devices = record.getDevices();
  if (devices.size() != session.objects().devices().size()) return kDamaged;
  for (unsigned d = 0; d < devices.size(); ++d) {
    const std::string here = nameOfDevice(driver_, session.objects().devices()[d]);
    if (here != devices[d].getName().cStr())
      return "the GPU is a " + here + ", not a " + devices[d].getName().cStr();
  }
  std::string why;
  session.space().reserve(1u << record.getSpace(), why);
  return why;
}

std::string Rebuild::makeAhead(Session& session) {
  state_->cameAhead += state_->record().getEntries().size();
  std::string why = stream_ ? receiveImages(session) : "";
  if (why.empty()) why = repeatCalls(session, true);
  return !why.empty() || answer("") ? why : socket_.error();
}

std::string Rebuild::makeRest(Session& session) {
  const auto record = state_->record();
  std::string why = stream_ ? receiveImages(session) : "";
  if (why.empty()) why = makeMemory(session);
  if (why.empty()) why = bringIn(session);
  if (!why.empty()) return why;
  registerHost(session);
  if (record.getHost().size() != 0) session.registerHost();  // the others, in whatever context comes
  session.space().setRepeating(true);
  why = repeatCalls(session, false);
  session.space().setRepeating(false);
  registerHost(session);
  if (why.empty() && stream_) why = receiveMemory(session);
  if (why.empty()) why = receiveContents(session);
  if (why.empty()) why = adoptTimes(session);
  if (why.empty()) why = offerImages(session);
  if (why.empty()) why = compareContents(session);
  if (!why.empty()) return why;
  for (const schema::ImageName& name : state_->sent) session.images().take(name);
  std::vector<uint32_t> named;
  for (const uint32_t count : record.getNamed()) named.push_back(count);
  session.objects().setNamed(named);
  session.setNumbers(
      {record.getLastFrame(), record.getLastAside(), record.getCompleted(), record.getEffects()});
  return "";
}

std::string Rebuild::makeMemory(Session& session) {
  const auto record = state_->record();
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
  if (std::string why = session.space().adopt(pieces, peers); !why.empty()) return why;
  const auto host = record.getHost();
  for (unsigned i = 0; i < host.size(); ++i) {
    const int descriptor = stream_ ? -1 : fcntl(state_->host[i], F_DUPFD_CLOEXEC, 3);
    if ((descriptor < 0 && !stream_) ||
        !session.space().adoptHost(host[i].getAddress(), descriptor, host[i].getBytes()))
      return "the session's pinned memory cannot be taken over";
  }
  auto lock = session.holdMirrors();
  for (const auto mirror : record.getMirrors())
    session.mirror(mirror.getAddress()).apply(0, bytesOf(mirror.getBase()));
  return "";
}

// Pinned memory, where it was, in contexts that are there.
void Rebuild::registerHost(Session& session) {
  for (const auto host : state_->record().getHost())
    if (host.getContext() != 0 && session.makeCurrentAgain(host.getContext()) == CUDA_SUCCESS)
      session.space().registerHostHere(host.getAddress());
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
    if (piece.getDevice() >= left.size()) return kDamaged;
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
  std::vector<schema::ImageName> lacking;
  for (const schema::ImageName& name : imagesOf(state_->record())) {
    if (session.images().offer(name))
      session.images().take(name);
    else
      lacking.push_back(name);
  }
  std::vector<std::byte> list(std::as_bytes(std::span(lacking)).begin(),
                              std::as_bytes(std::span(lacking)).end());
  const auto offer = state_->parallel.offer(socket_, state_->record().getParallel());
  if (offer) {
    const auto bytes = std::as_bytes(std::span(&*offer, 1));
    list.insert(list.end(), bytes.begin(), bytes.end());
  }
  if (!socket_.answer("") || !socket_.sendBlock(list)) return socket_.error();
  if (offer && !state_->parallel.accept(socket_)) return socket_.error();
  for (const schema::ImageName& name : lacking) {
    if (std::string why = receiveImage(session, name); !why.empty()) return why;
    state_->sent.push_back(name);
  }
  return "";
}

// Hashed and kept as a client's own would be.
std::string Rebuild::receiveImage(Session& session, const schema::ImageName& name) {
  if (name.bytes == 0 || name.bytes > Images::kMostBytes) return kDamaged;
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
  const std::string why = received ? receiveDevices(session, socket_, state_->parallel) : socket_.error();
  state_->parallel.close();
  return why;
}

// The program runs meanwhile, and may ask for the memory that is free.
bool Rebuild::hasRoomAhead() const {
  size_t free = 0, all = 0;
  const bool known = driver_.cuMemGetInfo_v2(&free, &all) == CUDA_SUCCESS;  // not without a context
  return !known || free >= std::min(kSpareAhead, all / 8);
}

// ahead: beside the old worker's memory there may be no room for them. The rest comes later then.
std::string Rebuild::repeatCalls(Session& session, bool ahead) {
  for (; state_->servedRecords < state_->records.size(); ++state_->servedRecords, state_->servedEntries = 0) {
    const auto record = state_->records[state_->servedRecords].message->getRoot<SessionRecord>();
    const auto entries = record.getEntries();
    for (; state_->servedEntries < entries.size(); ++state_->servedEntries) {
      if (ahead && !hasRoomAhead()) return "";
      CUresult status = CUDA_SUCCESS;
      const std::string why = repeatCall(session, entries[state_->servedEntries], status);
      if (ahead && status == CUDA_ERROR_OUT_OF_MEMORY) return "";
      if (!why.empty()) return why;
    }
  }
  return "";
}

std::string Rebuild::repeatCall(Session& session, schema::RecordEntry::Reader entry, CUresult& status) {
  const auto frame = bytesOf(entry.getFrame()), arguments = bytesOf(entry.getArguments()),
             outputs = bytesOf(entry.getOutputs());
  Call call;
  if (frame.size() != sizeof call.frame) return kDamaged;
  std::memcpy(&call.frame, frame.data(), sizeof call.frame);
  call.bytes.assign(arguments.begin(), arguments.end());
  const Handler* handler = findHandler(call.frame.call);
  if (handler == nullptr || handler->aside) return kDamaged;
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
  status = call.status;
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
    if (bytes.size() != sizeof name || image.getLoads() > kMostLoads) return kDamaged;
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
    if (array.getLevels() > kMostLevels) return kDamaged;
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
  bool hostToo = false;
  for (const auto one : theirs) hostToo = hostToo || one.getName() == kWordsDigest;
  const HostDigests hostBy = !stream_  ? HostDigests::ofIdentity
                             : hostToo ? HostDigests::ofBytes
                                       : HostDigests::none;
  Digests mine;
  if (std::string why = contentDigests(session, contents, hostBy, mine); !why.empty()) return why;
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
