#pragma once
// What programs of different builds say to each other in Cap'n Proto, as lines that a file pins. Ordinals and
// types say where everything lies in a message, and the ids and ordinals of interfaces which call is meant.
//
// The file's first line names the version. Lines may be added to it, with GPUPOOL_UPDATE_GOLDEN=1: a reader
// of an older build passes over what it does not know. A line that is gone or other than it was wants another
// version.

#include <capnp/schema.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <set>
#include <string>
#include <utility>

#include "catch.h"

namespace gpupool::test {

class PinnedLines {
 public:
  using Lines = std::set<std::string>;

  void add(std::string line) { lines_.insert(std::move(line)); }
  // These with all that is in them.
  void add(capnp::StructSchema schema) {
    if (!seen_.insert(nameOf(schema)).second) return;
    for (const auto field : schema.getFields()) {
      const auto proto = field.getProto();
      std::string line = nameOf(schema) + "." + proto.getName().cStr();
      if (proto.getOrdinal().isExplicit()) line += " @" + std::to_string(proto.getOrdinal().getExplicit());
      add(line + " :" + nameOf(field.getType()));
    }
  }
  void add(capnp::EnumSchema schema) {
    for (const auto one : schema.getEnumerants())
      add(nameOf(schema) + " " + std::to_string(one.getOrdinal()) + " " + one.getProto().getName().cStr());
  }
  void add(capnp::InterfaceSchema schema) {
    if (!seen_.insert(nameOf(schema)).second) return;
    char id[32];
    std::snprintf(id, sizeof id, "0x%016llx", static_cast<unsigned long long>(schema.getProto().getId()));
    add("interface " + nameOf(schema) + " " + id);
    for (const auto method : schema.getMethods()) {
      add("interface " + nameOf(schema) + " @" + std::to_string(method.getOrdinal()) + " " +
          method.getProto().getName().cStr());
      add(method.getParamType());
      add(method.getResultType());
    }
  }

  // Against the file at `path`, whose first line is `version`.
  void check(const std::string& path, const std::string& version) const {
    Lines pinned;
    std::string first;
    {
      std::ifstream file(path);
      std::getline(file, first);
      for (std::string line; std::getline(file, line);) pinned.insert(line);
    }
    const std::string gone = without(pinned, lines_);
    const char* update = std::getenv("GPUPOOL_UPDATE_GOLDEN");
    if (update != nullptr && *update == '1' && (gone.empty() || first != version)) {
      std::ofstream file(path);
      file << version << '\n';
      for (const std::string& line : lines_) file << line << '\n';
      return;
    }
    INFO("gone, or not what it was:" << gone);
    INFO("new:" << without(lines_, pinned));
    INFO(path << ": the text before the test says what to do");
    CHECK(first == version);
    CHECK(gone.empty());
    CHECK(pinned == lines_);
  }

 private:
  // "Lease", "Manager.renew$Params".
  static std::string nameOf(capnp::Schema schema) {
    const std::string name = schema.getProto().getDisplayName().cStr();
    return name.substr(name.rfind(':') + 1);
  }
  std::string nameOf(capnp::Type type) {
    if (type.isList()) return "List(" + nameOf(type.asList().getElementType()) + ")";
    if (type.isEnum()) return add(type.asEnum()), nameOf(type.asEnum());
    if (type.isStruct()) return add(type.asStruct()), nameOf(type.asStruct());
    if (type.isInterface()) return add(type.asInterface()), nameOf(type.asInterface());
    constexpr const char* kPlain[] = {"Void",   "Bool",   "Int8",   "Int16",   "Int32",   "Int64", "UInt8",
                                      "UInt16", "UInt32", "UInt64", "Float32", "Float64", "Text",  "Data"};
    return type.which() <= capnp::schema::Type::DATA ? kPlain[static_cast<size_t>(type.which())]
                                                     : "another type";
  }
  static std::string without(const Lines& all, const Lines& those) {
    std::string text;
    for (const std::string& line : all)
      if (!those.contains(line)) text += "\n  " + line;
    return text;
  }

  Lines lines_;
  std::set<std::string> seen_;
};

}  // namespace gpupool::test
