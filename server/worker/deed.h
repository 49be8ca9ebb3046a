#pragma once
// What a served call means for the session's record, from its row: which object it makes, changes or ends,
// which others it uses, and what of it is kept. The few rows whose roles do not say so have a case here.

#include "server/worker/codec.h"
#include "server/worker/record.h"
#include "server/worker/session.h"

namespace gpupool::server {

template <class R>
class DeedOf {
  template <template <schema::Name> class Wanted>
  static consteval bool hasRole() {
    return []<class... Roles>(std::tuple<Roles...>*) {
      return (schema::isRole<Wanted, Roles> || ... || false);
    }(static_cast<typename R::RoleList*>(nullptr));
  }
  static consteval bool is(std::string_view name) { return R::name.view() == name; }

 public:
  static constexpr bool mints = hasRole<schema::Mints>(), frees = hasRole<schema::Frees>();
  static constexpr bool beginsCapture = is("cuStreamBeginCapture_v2") || is("cuStreamBeginCaptureToGraph");
  static constexpr bool endsCapture = is("cuStreamEndCapture");
  static constexpr bool destroysView = is("cuTexObjectDestroy") || is("cuSurfObjectDestroy");
  // Ends a context: its handler tells the record, which needs to know whose.
  static constexpr bool endsContext = is("cuCtxDestroy_v2") || is("cuDevicePrimaryCtxReset_v2");
  // Kept whenever it succeeds, not only if it is part of a capture or has named a handle.
  static constexpr bool kept =
      !endsContext && (mints || frees || hasRole<schema::DeviceValue>() || R::recorded || R::setting ||
                       R::loads || beginsCapture || endsCapture);
  // A rebuilt session must answer the same. Logs may differ, and so does the number of a capture that was
  // invalidated, which the driver gives.
  static constexpr bool verified =
      []<class... Roles>(std::tuple<Roles...>*) {
        return !(schema::isArrayRole<schema::OutText, Roles> || ... || false);
      }(static_cast<typename R::RoleList*>(nullptr)) &&
      !is("sessionCaptureInfo");

  DeedOf(Session& session, Call& call, Arguments<R>& arguments)
      : objects_(session.objects()), call_(call), arguments_(arguments) {
    collect();
  }

  // capture: that the call's stream belongs to, as the driver numbers it; 0: none. named: what it named.
  Record::Deed make(uint64_t capture, const std::vector<uint64_t>& named) {
    Record::Deed deed;
    deed.uses = used_;
    if constexpr (frees || destroysView) {
      deed.subject = destroysView ? viewOf(call_.bytes) : freed_;
      deed.ends = handles::kindOf(freed_) != HandleKind::graphNode;
      deed.placed =
          handles::kindOf(freed_) == HandleKind::module || handles::kindOf(freed_) == HandleKind::library;
    } else if constexpr (beginsCapture) {
      deed.subject = Record::capture(capture);
      deed.creates = is("cuStreamBeginCapture_v2");
    } else if constexpr (mints) {
      mint(deed);
    } else if constexpr (is("cuTexObjectCreate") || is("cuSurfObjectCreate")) {
      deed.subject = viewOf(call_.out.span());
      deed.creates = true;
    } else if (capture != 0) {
      deed.subject = Record::capture(capture);
    } else {
      deed.subject = subject();
    }
    deed.aliases.insert(deed.aliases.end(), named.begin(), named.end());
    // The driver numbers them, and those that have ended count.
    if constexpr (is("cuGraphConditionalHandleCreate")) deed.placed = true;
    if (R::setting || R::loads) {
      deed.kept = R::setting ? Record::Deed::Kept::last : Record::Deed::Kept::first;
      deed.key = key_;
      if (mints || frees) deed.kept = Record::Deed::Kept::always;
    }
    return deed;
  }

 private:
  void collect() {
    key_ = mix(0, R::id);
    forEachSlot([&](auto role, auto& slot) {
      using Role = decltype(role);
      if constexpr (schema::isRole<schema::Mints, Role>) {
        minted_ = slot.id();
      } else if constexpr (schema::isRole<schema::Frees, Role>) {
        freed_ = slot.id();
      } else if constexpr (schema::isRole<schema::Handle, Role>) {
        use(slot.id());
        if (first_ == 0) first_ = slot.id();
        if (first_ == slot.id() || handles::kindOf(slot.id()) == HandleKind::graphNode)
          key_ = mix(key_, slot.id());
      } else if constexpr (schema::isRole<schema::Struct, Role> || schema::isRole<schema::InOut, Role>) {
        if (slot.wanted()) useInside(slot.plain());
      } else if constexpr (schema::isArrayRole<schema::Array, Role>) {
        for (auto& element : slot.array()) useInside(element);
      } else if constexpr (schema::isRole<schema::Device, Role>) {
        device_ = Record::device(static_cast<uint64_t>(slot.value()));
        key_ = mix(key_, device_);
      } else if constexpr (schema::isRole<schema::Text, Role>) {
        key_ = mix(key_, std::hash<std::string>{}(slot.text()));
      } else if constexpr (schema::isRole<schema::In, Role>) {
        if constexpr (std::is_enum_v<std::decay_t<decltype(slot.value())>>)
          key_ = mix(key_, static_cast<uint64_t>(slot.value()));
      }
    });
    key_ = mix(key_, call_.frame.context);
  }
  template <class T>
  void useInside(T& value) {
    if constexpr (schema::isHandle<T>) {
      use(objects_.known(value));
    } else {
      schema::eachHandle(value, [&](auto& handle) { use(objects_.known(handle)); });
    }
  }
  void use(uint64_t id) {
    if (handles::kindOf(id) != HandleKind::none) used_.push_back(id);
  }

  // Nodes, kernels, functions, a library's module and a mipmap's level live and end with what they are of.
  void mint(Record::Deed& deed) {
    const HandleKind kind = handles::kindOf(minted_);
    const bool part = kind == HandleKind::graphNode || kind == HandleKind::kernel ||
                      kind == HandleKind::function || is("cuLibraryGetModule") ||
                      is("cuMipmappedArrayGetLevel");
    deed.subject = part ? first_ : minted_;
    deed.creates = !part;
    if (part) deed.aliases.push_back(minted_);
    deed.placed = kind == HandleKind::library || (kind == HandleKind::module && !part);
  }
  uint64_t subject() const {
    if constexpr (is("cuCtxEnablePeerAccess") || is("cuCtxDisablePeerAccess")) return call_.frame.context;
    if (first_ != 0) return first_;
    if (R::arity != 0 && device_ != 0 && call_.frame.context == 0) return device_;
    return call_.frame.context;
  }
  // The first eight bytes: the object's value, as argument or as output.
  static uint64_t viewOf(std::span<const std::byte> bytes) {
    uint64_t value = 0;
    if (bytes.size() >= sizeof value) std::memcpy(&value, bytes.data(), sizeof value);
    return is("cuTexObjectCreate") || is("cuTexObjectDestroy") ? Record::texture(value)
                                                               : Record::surface(value);
  }
  static uint64_t mix(uint64_t hash, uint64_t value) {
    hash ^= value + 0x9e3779b97f4a7c15 + (hash << 6) + (hash >> 2);
    return hash * 0xff51afd7ed558ccd;
  }
  template <class F>
  void forEachSlot(F&& f) {
    [&]<class... Roles>(std::tuple<Roles...>*) {
      (f(Roles{}, arguments_.template get<Roles::name>()), ...);
    }(static_cast<typename R::RoleList*>(nullptr));
  }

  Objects& objects_;
  Call& call_;
  Arguments<R>& arguments_;
  uint64_t minted_ = 0, freed_ = 0, first_ = 0, device_ = 0, key_ = 0;
  std::vector<uint64_t> used_;
};

}  // namespace gpupool::server
