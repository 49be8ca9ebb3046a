#pragma once
// The worker's half of a row: hostile bytes into checked arguments, the driver's outputs into reply bytes.
// Every length and handle is checked here, once; a bad one makes the reader bad and the driver is not called.

#include <array>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "schema/rows.h"
#include "schema/structs.h"
#include "schema/wire.h"
#include "server/worker/objects.h"

namespace gpupool::server {

using schema::ByteBuffer;

using schema::Reader;

// An output array may ask for this many elements at most.
inline constexpr size_t kMaxOutElements = size_t{1} << 20;

// Storage for one parameter of row R: decoded from the frame, handed to the driver, written to the reply.
template <class R, class Role, class T>
class Slot {
  using P = std::remove_const_t<std::remove_pointer_t<T>>;
  using Plain =
      std::conditional_t<std::is_void_v<P> || std::is_function_v<P> || schema::isHandle<T>, char, P>;
  template <template <schema::Name> class X>
  static constexpr bool is = schema::isRole<X, Role>;
  static constexpr bool isArray = schema::isArrayRole<schema::Array, Role>;
  static constexpr bool isOutArray = schema::isArrayRole<schema::OutArray, Role>;
  static constexpr bool isOutText = schema::isArrayRole<schema::OutText, Role>;
  static constexpr bool isStructIn = is<schema::Struct> || is<schema::InOut>;
  // Plain bytes are used where they lie in the frame, which is this process's own copy.
  static constexpr bool isBytes = isArray && std::is_same_v<Plain, unsigned char>;
  struct NoText {};
  struct NoArray {};
  using TextStore = std::conditional_t<is<schema::Text>, std::string, NoText>;
  using ArrayStore =
      std::conditional_t<isBytes, std::span<unsigned char>,
                         std::conditional_t<isArray || isOutArray || isOutText, std::vector<Plain>, NoArray>>;

 public:
  void read(Reader& in, Objects& objects) {
    if constexpr (is<schema::In>) {
      if constexpr (sizeof(T) <= 8) {
        uint64_t small = in.value<uint64_t>();
        std::memcpy(static_cast<void*>(&value_), &small, sizeof value_);
      } else {
        value_ = in.value<T>();
      }
    } else if constexpr (is<schema::HostAddress>) {
      value_ = reinterpret_cast<T>(in.value<uint64_t>());  // its handler checks the span it uses
    } else if constexpr (is<schema::Device>) {
      if (!objects.device(in.value<uint64_t>(), value_)) wrong_ = CUDA_ERROR_INVALID_DEVICE;
    } else if constexpr (is<schema::Handle> || is<schema::Frees>) {
      id_ = in.value<uint64_t>();
      if (!objects.find(id_, value_)) wrong_ = CUDA_ERROR_INVALID_HANDLE;
    } else if constexpr (is<schema::Mints>) {
      id_ = in.value<uint64_t>();
      if (id_ != 0 && !objects.mayMint(schema::handleKind<P>, id_)) in.fail();
    } else if constexpr (is<schema::OutHandle> || is<schema::Out> || is<schema::DeviceValue>) {
      wanted_ = in.value<uint64_t>() != 0;
    } else if constexpr (isStructIn) {
      wanted_ = in.value<uint64_t>() != 0;
      if (wanted_) {
        plain_ = in.value<Plain>();
        schema::eachHandle(plain_, [&](auto& handle) { mapHandle(handle, objects); });
      }
    } else if constexpr (is<schema::Text>) {
      text_ = std::string(in.text());
    } else if constexpr (isBytes) {
      auto bytes = in.blob();
      array_ = {const_cast<unsigned char*>(reinterpret_cast<const unsigned char*>(bytes.data())),
                bytes.size()};
    } else if constexpr (isArray) {
      auto bytes = in.blob();
      if (bytes.size() % sizeof(Plain) != 0) return in.fail();
      array_.resize(bytes.size() / sizeof(Plain));
      if (!bytes.empty()) std::memcpy(array_.data(), bytes.data(), bytes.size());
      for (Plain& element : array_) {
        if constexpr (schema::isHandle<Plain>)
          mapHandle(element, objects);
        else
          schema::eachHandle(element, [&](auto& handle) { mapHandle(handle, objects); });
      }
    } else if constexpr (isOutArray || isOutText) {
      wanted_ = in.value<uint64_t>() != 0;
    }
  }

  // After all were read: arrays meet their counts. False: the frame lies.
  template <class Slots>
  bool settle(Slots& slots) {
    if constexpr (isArray || isOutArray || isOutText) {
      constexpr size_t index = schema::parameterIndex<R, Role::count>();
      auto& count = std::get<index>(slots);
      uint64_t n = count.asCount();
      if constexpr (isArray) {
        return array_.empty() || n == array_.size();
      } else {
        if (n > kMaxOutElements) return false;
        if (wanted_) array_.resize(n + (isOutText ? 1 : 0));
      }
    }
    return true;
  }
  uint64_t asCount() const {
    if constexpr (is<schema::InOut>)
      return static_cast<uint64_t>(plain_);
    else if constexpr (is<schema::In> && std::is_integral_v<T>)
      return value_ < 0 ? 0 : static_cast<uint64_t>(value_);
    else
      return 0;
  }

  CUresult wrong() const { return wrong_; }

  T pass() {
    if constexpr (is<schema::In> || is<schema::HostAddress> || is<schema::Device> || is<schema::Handle> ||
                  is<schema::Frees>)
      return value_;
    else if constexpr (is<schema::Mints>)
      return &made_;
    else if constexpr (is<schema::OutHandle>)
      return wanted_ ? &made_ : nullptr;
    else if constexpr (is<schema::Out> || is<schema::DeviceValue> || isStructIn)
      return wanted_ ? &plain_ : nullptr;
    else if constexpr (is<schema::Text>)
      return text_.c_str();
    else if constexpr (isArray)
      return array_.empty() ? nullptr : array_.data();
    else if constexpr (isOutArray || isOutText)
      return wanted_ ? array_.data() : nullptr;
    else
      return T{};
  }

  // After the call.
  void finish(bool success, Objects& objects) {
    if constexpr (is<schema::Mints>) {
      if (success && id_ != 0) objects.mint(id_, made_);
    } else if constexpr (is<schema::Frees>) {
      if (success) objects.retire(id_);
    }
  }
  template <class Slots>
  void write(ByteBuffer& out, Objects& objects, Slots& slots) {
    if constexpr (is<schema::OutHandle>) {
      out.value<uint64_t>(wanted_ ? objects.name(made_) : 0);
    } else if constexpr (is<schema::Out> || is<schema::DeviceValue> || is<schema::InOut>) {
      schema::eachHandle(plain_, [&](auto& handle) {
        handle = schema::asHandle<std::decay_t<decltype(handle)>>(objects.name(handle));
      });
      out.raw(&plain_, sizeof plain_);
    } else if constexpr (isOutArray) {
      constexpr size_t index = schema::parameterIndex<R, Role::count>();
      size_t n = wanted_ ? std::min<size_t>(std::get<index>(slots).asCount(), array_.size()) : 0;
      if constexpr (schema::isHandle<Plain>)
        for (size_t i = 0; i < n; ++i) array_[i] = schema::asHandle<Plain>(objects.name(array_[i]));
      out.blob(array_.data(), n * sizeof(Plain));
    } else if constexpr (isOutText) {
      size_t n = wanted_ && !array_.empty()
                     ? ::strnlen(reinterpret_cast<const char*>(array_.data()), array_.size() - 1)
                     : 0;
      out.text({reinterpret_cast<const char*>(array_.data()), n});
    }
  }

  // For named handlers.
  T& value() { return value_; }
  Plain& plain() { return plain_; }
  uint64_t id() const { return id_; }
  ArrayStore& array() { return array_; }
  TextStore& text() { return text_; }
  bool wanted() const { return wanted_; }

 private:
  template <class H>
  void mapHandle(H& handle, Objects& objects) {
    H real{};
    if (!objects.find(schema::rawHandle(handle), real)) wrong_ = CUDA_ERROR_INVALID_HANDLE;
    handle = real;
  }

  T value_{};
  std::conditional_t<schema::isHandle<P>, P, char> made_{};
  Plain plain_{};
  [[no_unique_address]] ArrayStore array_;
  [[no_unique_address]] TextStore text_;
  uint64_t id_ = 0;
  bool wanted_ = false;
  CUresult wrong_ = CUDA_SUCCESS;
};

// All parameters of one call.
template <class R>
class Arguments {
 public:
  // False: the frame is malformed (the session ends). wrong() afterwards: the error of a handle or device
  // that is none.
  bool read(Reader& in, Objects& objects) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      (std::get<I>(slots_).read(in, objects), ...);
      return !in.bad() && (std::get<I>(slots_).settle(slots_) && ... && true);
    }(Indices{});
  }
  CUresult wrong() const {
    CUresult status = CUDA_SUCCESS;
    [&]<size_t... I>(std::index_sequence<I...>) {
      ((status = status != CUDA_SUCCESS ? status : std::get<I>(slots_).wrong()), ...);
    }(Indices{});
    return status;
  }
  template <class F>
  CUresult call(F function) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return function(std::get<I>(slots_).pass()...);
    }(Indices{});
  }
  void finish(bool success, Objects& objects) {
    [&]<size_t... I>(std::index_sequence<I...>) {
      (std::get<I>(slots_).finish(success, objects), ...);
    }(Indices{});
  }
  void write(ByteBuffer& out, Objects& objects) {
    [&]<size_t... I>(std::index_sequence<I...>) {
      (std::get<I>(slots_).write(out, objects, slots_), ...);
    }(Indices{});
  }
  // The parameter called `N`.
  template <schema::Name N>
  auto& get() {
    return std::get<schema::parameterIndex<R, N>()>(slots_);
  }

 private:
  using Indices = std::make_index_sequence<R::arity>;
  template <class L, class A>
  struct Make;
  template <class... Roles, class... A>
  struct Make<std::tuple<Roles...>, std::tuple<A...>> {
    using Type = std::tuple<Slot<R, Roles, A>...>;
  };
  typename Make<typename R::RoleList, typename R::Arguments>::Type slots_;
};

}  // namespace gpupool::server
