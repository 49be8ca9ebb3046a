// Pins what servers and workers of different builds rely on: server/worker_interface.h says what that is, and
// when its number is raised.
//
// worker_interface.txt holds a line for each. Lines may be added, with GPUPOOL_UPDATE_GOLDEN=1: a reader of
// an older build passes over fields, options and verbs that it does not know. A line that is gone or other
// than it was wants another kWorkerInterface; so does an added one that an older build must not pass over.
#include <capnp/schema.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>

#include "schema/pool.capnp.h"
#include "schema/record.capnp.h"
#include "server/copier/protocol.h"
#include "server/worker_interface.h"
#include "server/worker_process.h"

#include "catch.h"

using namespace gpupool;
using namespace gpupool::server;

namespace {

using Lines = std::set<std::string>;

std::string shortName(capnp::Schema schema) {
  const std::string name = schema.getProto().getDisplayName().cStr();
  return name.substr(name.find_last_of(":.") + 1);
}

class Interface {
 public:
  Interface() {
    add(capnp::Schema::from<schema::WorkerOrder>());
    add(capnp::Schema::from<schema::WorkerStart>());
    add(capnp::Schema::from<schema::WorkerReport>());
    add(capnp::Schema::from<schema::SessionRecord>());
    lines_.insert("state format " + std::to_string(schema::STATE_FORMAT));
    lines_.insert("control descriptor " + std::to_string(kControlDescriptor));
    lines_.insert("signal of a server's death " + std::to_string(kServerDiedSignal));
    lines_.insert("exit status when stopped " + std::to_string(WorkerProcess::kExitStopped));
    addOptions();
    addCopier();
  }
  const Lines& lines() const { return lines_; }

 private:
  // Ordinals and types say where everything lies in a message.
  void add(capnp::StructSchema schema) {
    if (!seen_.insert(shortName(schema)).second) return;
    for (const auto field : schema.getFields()) {
      const auto proto = field.getProto();
      std::string line = shortName(schema) + "." + proto.getName().cStr();
      if (proto.getOrdinal().isExplicit()) line += " @" + std::to_string(proto.getOrdinal().getExplicit());
      lines_.insert(line + " :" + nameOf(field.getType()));
    }
  }
  void add(capnp::EnumSchema schema) {
    for (const auto one : schema.getEnumerants())
      lines_.insert(shortName(schema) + " " + std::to_string(one.getOrdinal()) + " " +
                    one.getProto().getName().cStr());
  }
  std::string nameOf(capnp::Type type) {
    if (type.isList()) return "List(" + nameOf(type.asList().getElementType()) + ")";
    if (type.isEnum()) return add(type.asEnum()), shortName(type.asEnum());
    if (type.isStruct()) return add(type.asStruct()), shortName(type.asStruct());
    constexpr const char* kPlain[] = {"Void",   "Bool",   "Int8",   "Int16",   "Int32",   "Int64", "UInt8",
                                      "UInt16", "UInt32", "UInt64", "Float32", "Float64", "Text",  "Data"};
    return type.which() <= capnp::schema::Type::DATA ? kPlain[static_cast<size_t>(type.which())]
                                                     : "another type";
  }
  void addOptions() {
    std::istringstream words(kWorkerUsage);
    for (std::string word; words >> word;)
      if (const size_t at = word.find("--"); at != std::string::npos)
        lines_.insert("option " +
                      word.substr(at, word.find_first_not_of("-abcdefghijklmnopqrstuvwxyz", at) - at));
  }
  void addCopier() {
    const std::pair<const char*, CopierVerb> verbs[] = {
        {"plan", CopierVerb::plan},       {"reserve", CopierVerb::reserve},
        {"takeOut", CopierVerb::takeOut}, {"beginBringIn", CopierVerb::beginBringIn},
        {"bringIn", CopierVerb::bringIn}, {"done", CopierVerb::done},
        {"refused", CopierVerb::refused}, {"across", CopierVerb::across}};
    for (const auto& [name, verb] : verbs)
      lines_.insert(std::string("copier ") + name + " " + std::to_string(static_cast<uint32_t>(verb)));
    lines_.insert("copier magic " + std::to_string(kCopierMagic));
    lines_.insert("copier datagram " + std::to_string(kCopierDatagram) + ", batch " +
                  std::to_string(kMostInBatch));
    lines_.insert("copier bytes: message " + std::to_string(sizeof(CopierMessage)) + ", planned " +
                  std::to_string(sizeof(CopierPlanned)) + ", placed " + std::to_string(sizeof(CopierPlaced)) +
                  ", crossing " + std::to_string(sizeof(CopierCrossing)));
  }

  Lines lines_;
  std::set<std::string> seen_;
};

std::string without(const Lines& all, const Lines& those) {
  std::string text;
  for (const std::string& line : all)
    if (!those.contains(line)) text += "\n  " + line;
  return text;
}

}  // namespace

TEST_CASE("a worker of another build of this interface finds what it relies on") {
  const std::string path = WORKER_INTERFACE, number = "interface " + std::to_string(kWorkerInterface);
  const Interface interface;
  Lines pinned;
  std::string first;
  {
    std::ifstream file(path);
    std::getline(file, first);
    for (std::string line; std::getline(file, line);) pinned.insert(line);
  }
  const std::string gone = without(pinned, interface.lines());
  const char* update = std::getenv("GPUPOOL_UPDATE_GOLDEN");
  if (update != nullptr && *update == '1' && (gone.empty() || first != number)) {
    std::ofstream file(path);
    file << number << '\n';
    for (const std::string& line : interface.lines()) file << line << '\n';
    return;
  }
  INFO("gone, or not what it was:" << gone);
  INFO("new:" << without(interface.lines(), pinned));
  INFO(path << ": the text before the first test says what to do");
  CHECK(first == number);
  CHECK(gone.empty());
  CHECK(pinned == interface.lines());
}
