#include "server/worker/session_state.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "schema/rows.h"
#include "server/arena_mmap.h"
#include "server/worker/array_scrub.h"
#include "server/worker/device_stream.h"

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

void writeSelf(Session& session, SessionRecord::Builder out) {
  const Driver& driver = session.driver();
  int version = 0;
  driver.cuDriverGetVersion(&version);
  out.setRowsHash(schema::rowsHash());
  out.setDriverVersion(version);
  out.setSoftwareDriver(driver.software());
  out.setSpace(static_cast<uint32_t>(session.space().reserved()));
  const auto& devices = session.objects().devices();
  auto list = out.initDevices(static_cast<unsigned>(devices.size()));
  for (unsigned d = 0; d < list.size(); ++d) {
    char name[256] = {};
    driver.cuDeviceGetName(name, sizeof name - 1, devices[d]);
    list[d].setName(name);
  }
  const Session::Numbers numbers = session.numbers();
  out.setLastFrame(numbers.lastFrame);
  out.setLastAside(numbers.lastAside);
  out.setCompleted(numbers.completed);
  out.setEffects(numbers.effects);
  const auto named = session.objects().named();
  auto counts = out.initNamed(static_cast<unsigned>(named.size()));
  for (unsigned kind = 0; kind < counts.size(); ++kind) counts.set(kind, named[kind]);
}

// ---- contents that the driver keeps: variables of modules, arrays

struct Variable {
  uint64_t owner = 0, context = 0;
  std::string name;
  CUdeviceptr address = 0;
  size_t bytes = 0;
};
struct ArrayState {
  uint64_t id = 0, context = 0;
  unsigned levels = 0;
  uint64_t bytes = 0;
};

struct Contents {
  std::vector<Variable> variables;
  std::vector<ArrayState> arrays;
};

// The image that a module or library was loaded from; arguments as sessionModuleLoad and sessionLibraryLoad
// have them.
struct LoadedImage {
  schema::ImageName name;
  unsigned kind = 0;
};
std::optional<LoadedImage> imageOf(const Record::Entry& load) {
  schema::Reader in(load.arguments);
  in.value<uint64_t>();
  LoadedImage image;
  image.name = in.value<schema::ImageName>();
  image.kind = static_cast<unsigned>(in.value<uint64_t>());
  return in.bad() ? std::nullopt : std::optional(image);
}

std::string findVariables(Session& session, std::vector<Variable>& found) {
  std::map<uint64_t, Record::Entry> loads;
  for (const auto kind : {HandleKind::module, HandleKind::library})
    for (auto& [owner, entry] : session.record().living(kind)) loads[owner] = std::move(entry);
  for (const auto& [owner, context] : session.record().loadedCode()) {
    const auto load = loads.find(owner);
    const auto image = load == loads.end() ? std::nullopt : imageOf(load->second);
    if (!image) return "a code image of the program is not known any more";
    const Images::Contents* code =
        session.images().contents(image->name, image->kind, session.architecture());
    if (code == nullptr) return "a code image of the program is not in the server's cache, or cannot be read";
    if (code->mayAllocate) return "kernels of the program may use the device's heap (malloc, new)";
    if (session.makeCurrentAgain(context) != CUDA_SUCCESS) continue;  // it has ended
    for (const fatbin::Symbol& symbol : code->variables) {
      Variable variable{owner, context, symbol.name, 0, 0};
      if (findVariable(session, owner, symbol.name, variable.address, variable.bytes))
        found.push_back(variable);
    }
  }
  return "";
}

std::string findArrays(Session& session, std::vector<ArrayState>& found) {
  for (const auto kind : {HandleKind::array, HandleKind::mipmap})
    for (const auto& [id, entry] : session.record().living(kind)) {
      ArrayState state{id, entry.frame.context, 0, 0};
      if (session.makeCurrentAgain(state.context) != CUDA_SUCCESS) return "an array's context has ended";
      if (kind == HandleKind::mipmap && entry.arguments.size() >= 8) {  // the last argument
        uint64_t levels = 0;
        std::memcpy(&levels, entry.arguments.data() + entry.arguments.size() - 8, sizeof levels);
        state.levels = static_cast<unsigned>(std::min<uint64_t>(levels, 32));
      }
      for (CUarray level : levelsOf(session.driver(), session.objects(), id, state.levels)) {
        const uint64_t bytes = arrayBytes(session.driver(), level);
        if (bytes == 0) return "an array of the program has a format that cannot be copied";
        state.bytes += bytes;
      }
      found.push_back(state);
    }
  return "";
}

std::string sendContents(Session& session, StateSocket& socket, const Contents& contents) {
  std::vector<std::byte> bytes;
  const Driver& driver = session.driver();
  for (const Variable& variable : contents.variables) {
    bytes.resize(variable.bytes);
    CUresult status = session.makeCurrentAgain(variable.context);
    if (status == CUDA_SUCCESS) status = driver.cuMemcpyDtoH_v2(bytes.data(), variable.address, bytes.size());
    if (status != CUDA_SUCCESS)
      return "variable " + variable.name + " cannot be read: " + driver.describe(status);
    if (!socket.sendContent(bytes)) return socket.error();
  }
  for (const ArrayState& array : contents.arrays) {
    bytes.resize(array.bytes);
    CUresult status = session.makeCurrentAgain(array.context);
    size_t at = 0;
    for (CUarray level : levelsOf(driver, session.objects(), array.id, array.levels)) {
      const size_t part = arrayBytes(driver, level);
      if (status == CUDA_SUCCESS) status = copyArray(driver, level, std::span(bytes).subspan(at, part), true);
      at += part;
    }
    if (status != CUDA_SUCCESS) return "an array cannot be read: " + driver.describe(status);
    if (!socket.sendContent(bytes)) return socket.error();
  }
  return "";
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

std::string sendDescriptors(Session& session, StateSocket& socket, CopierLink* link) {
  std::vector<int> descriptors{session.views().words()->descriptor(),
                               session.views().staging()->descriptor()};
  if (link != nullptr) descriptors.push_back(link->descriptor());
  for (const auto& [address, memory] : session.space().hostPieces())
    descriptors.push_back(memory->descriptor());
  return socket.sendDescriptors(descriptors) ? "" : socket.error();
}

std::string hearAnswer(StateSocket& socket) {
  std::vector<std::byte> text;
  if (!socket.receiveBlock(text, kMostRefusalBytes)) return socket.error();
  return {reinterpret_cast<const char*>(text.data()), text.size()};
}

// Of a sender that cannot go on: `why`, or what the other worker has said, which then takes no more.
std::string hearRefusal(StateSocket& socket, const std::string& why) {
  if (socket.error().empty()) return why;
  socket.forgetError();
  const std::string said = hearAnswer(socket);
  return said.empty() ? why : said;
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
    host[at++].setBytes(memory->size());
  }
  out.setStagingBytes(session.views().staging()->size());
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

// "" or why the session cannot be rebuilt elsewhere.
std::string describe(Session& session, SessionRecord::Builder out, Contents& contents) {
  for (const std::string& reason : session.record().reasons()) return reason;
  if (std::string why = findVariables(session, contents.variables); !why.empty()) return why;
  if (std::string why = findArrays(session, contents.arrays); !why.empty()) return why;
  writeSelf(session, out);
  writeEntries(out, session.record().entries());
  if (std::string why = writeImages(session, out); !why.empty()) return why;
  writeMemory(out, session.space());
  writeHost(session, out);
  writeContents(contents, out);
  writeTimes(session, out);
  return "";
}

bool sendRecord(capnp::MessageBuilder& message, StateSocket& socket) {
  const auto words = capnp::messageToFlatArray(message);
  const auto bytes = std::as_bytes(std::span(words.begin(), words.size()));
  return socket.sendBlock(bytes) && socket.send(contentDigest(bytes));
}

// ---- the stream

bool same(const schema::ImageName& a, const schema::ImageName& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

// The other worker may ask for what the record names, and for each once.
std::string sendImages(Session& session, StateSocket& socket, std::vector<schema::ImageName> may) {
  std::vector<std::byte> asked;
  if (!socket.receiveBlock(asked, may.size() * sizeof(schema::ImageName))) return socket.error();
  for (size_t at = 0; at + sizeof(schema::ImageName) <= asked.size(); at += sizeof(schema::ImageName)) {
    schema::ImageName name;
    std::memcpy(&name, asked.data() + at, sizeof name);
    const auto known = std::find_if(may.begin(), may.end(), [&](const auto& one) { return same(one, name); });
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

std::string sendMemory(Session& session, StateSocket& socket) {
  const auto send = [&](const transport::SharedMemory& memory) {
    return socket.sendContent({memory.data(), memory.size()});
  };
  bool sent = send(*session.views().words()) && send(*session.views().staging());
  for (const auto& [address, memory] : session.space().hostPieces()) sent = sent && send(*memory);
  return sent ? DeviceStream(session).send(socket) : socket.error();
}

}  // namespace

std::string sendState(Session& session, StateSocket& socket, CopierLink* link, uint32_t& sequence) {
  Contents contents;
  capnp::MallocMessageBuilder message;
  auto out = message.initRoot<SessionRecord>();
  if (std::string why = describe(session, out, contents); !why.empty()) return why;
  if (link != nullptr) out.setCopierSequence(sequence = link->sequence());
  if (!sendRecord(message, socket)) return socket.error();
  std::string why = sendDescriptors(session, socket, link);
  if (why.empty()) why = sendContents(session, socket, contents);
  if (!why.empty()) {
    // A worker that cannot rebuild the session has said so, and takes no more. One that waits for more is
    // told that nothing follows: what it has said to the copier must be known.
    if (socket.error().empty()) socket.endSending();
    socket.forgetError();
    const std::string said = hearSequence(socket, sequence) ? hearAnswer(socket) : "";
    return said.empty() || said == kOtherEnded ? why : said;
  }
  return hearSequence(socket, sequence) ? hearAnswer(socket) : socket.error();
}

std::string streamState(Session& session, StateSocket& socket) {
  Contents contents;
  capnp::MallocMessageBuilder message;
  auto out = message.initRoot<SessionRecord>();
  if (std::string why = describe(session, out, contents); !why.empty()) return why;
  std::string why = sendRecord(message, socket) ? hearAnswer(socket) : socket.error();
  if (why.empty()) why = sendImages(session, socket, imagesOf(out.asReader()));
  if (why.empty()) why = hearAnswer(socket);
  if (why.empty()) why = sendMemory(session, socket);
  if (why.empty()) why = sendContents(session, socket, contents);
  return why.empty() ? hearAnswer(socket) : hearRefusal(socket, why);
}

std::optional<schema::ImageName> imageNamed(uint32_t call, std::span<const std::byte> arguments) {
  schema::Reader in(arguments);
  if (call == schema::RowOf<"sessionModuleLoad">::id || call == schema::RowOf<"sessionLibraryLoad">::id) {
    in.value<uint64_t>();
  } else if (call == schema::RowOf<"sessionLinkAdd">::id) {
    in.value<uint64_t>();
    in.value<uint64_t>();
  } else {
    return std::nullopt;
  }
  const auto name = in.value<schema::ImageName>();
  return in.bad() ? std::nullopt : std::optional(name);
}

std::vector<schema::ImageName> imagesOf(SessionRecord::Reader record) {
  std::vector<schema::ImageName> names;
  const auto bytesOf = [](capnp::Data::Reader data) {
    return std::span(reinterpret_cast<const std::byte*>(data.begin()), data.size());
  };
  for (const auto entry : record.getEntries()) {
    schema::Frame frame;
    const auto header = bytesOf(entry.getFrame());
    if (header.size() != sizeof frame) continue;  // who serves it again refuses it
    std::memcpy(&frame, header.data(), sizeof frame);
    if (const auto name = imageNamed(frame.call, bytesOf(entry.getArguments()))) names.push_back(*name);
  }
  for (const auto image : record.getImages()) {
    schema::ImageName& name = names.emplace_back();
    const auto bytes = bytesOf(image.getName());
    if (!image.getHere() || bytes.size() != sizeof name)
      names.pop_back();
    else
      std::memcpy(&name, bytes.data(), sizeof name);
  }
  const auto less = [](const schema::ImageName& a, const schema::ImageName& b) {
    return std::memcmp(&a, &b, sizeof a) < 0;
  };
  std::sort(names.begin(), names.end(), less);
  names.erase(std::unique(names.begin(), names.end(), same), names.end());
  return names;
}

uint64_t bootTimeNs() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

uint64_t arrayBytes(const Driver& driver, CUarray array) {
  CUDA_ARRAY3D_DESCRIPTOR_v2 shape{};
  if (driver.cuArray3DGetDescriptor_v2(&shape, array) != CUDA_SUCCESS ||
      (shape.Flags & (CUDA_ARRAY3D_DEFERRED_MAPPING | CUDA_ARRAY3D_SPARSE)) != 0)
    return 0;
  return shape.Width * arrayElementBytes(shape.Format, shape.NumChannels) *
         std::max<size_t>(shape.Height, 1) * std::max<size_t>(shape.Depth, 1);
}

CUresult copyArray(const Driver& driver, CUarray array, std::span<std::byte> bytes, bool out) {
  CUDA_ARRAY3D_DESCRIPTOR_v2 shape{};
  const CUresult status = driver.cuArray3DGetDescriptor_v2(&shape, array);
  if (status != CUDA_SUCCESS) return status;
  CUDA_MEMCPY3D_v2 copy{};
  copy.WidthInBytes = shape.Width * arrayElementBytes(shape.Format, shape.NumChannels);
  copy.Height = std::max<size_t>(shape.Height, 1);
  copy.Depth = std::max<size_t>(shape.Depth, 1);
  if (copy.WidthInBytes * copy.Height * copy.Depth != bytes.size()) return CUDA_ERROR_INVALID_VALUE;
  (out ? copy.srcMemoryType : copy.dstMemoryType) = CU_MEMORYTYPE_ARRAY;
  (out ? copy.dstMemoryType : copy.srcMemoryType) = CU_MEMORYTYPE_HOST;
  (out ? copy.srcArray : copy.dstArray) = array;
  if (out)
    copy.dstHost = bytes.data();
  else
    copy.srcHost = bytes.data();
  (out ? copy.dstPitch : copy.srcPitch) = copy.WidthInBytes;
  (out ? copy.dstHeight : copy.srcHeight) = copy.Height;
  return driver.cuMemcpy3D_v2(&copy);
}

std::vector<CUarray> levelsOf(const Driver& driver, Objects& objects, uint64_t id, unsigned levels) {
  std::vector<CUarray> all;
  CUmipmappedArray mipmap = nullptr;
  CUarray array = nullptr;
  if (levels == 0) {
    if (objects.find(id, array)) all.push_back(array);
    return all;
  }
  if (!objects.find(id, mipmap)) return all;
  for (unsigned level = 0; level < levels; ++level)
    if (driver.cuMipmappedArrayGetLevel(&array, mipmap, level) == CUDA_SUCCESS) all.push_back(array);
  return all;
}

bool findVariable(Session& session, uint64_t owner, const std::string& name, CUdeviceptr& address,
                  size_t& bytes) {
  CUmodule module = nullptr;
  CUlibrary library = nullptr;
  PlaceGlobals place;
  const Driver& driver = session.driver();
  if (handles::kindOf(owner) == HandleKind::module)
    return session.objects().find(owner, module) &&
           driver.cuModuleGetGlobal_v2(&address, &bytes, module, name.c_str()) == CUDA_SUCCESS && bytes != 0;
  if (!session.objects().find(owner, library)) return false;
  return (driver.cuLibraryGetGlobal(&address, &bytes, library, name.c_str()) == CUDA_SUCCESS ||
          driver.cuLibraryGetManaged(&address, &bytes, library, name.c_str()) == CUDA_SUCCESS) &&
         bytes != 0;
}

}  // namespace gpupool::server
