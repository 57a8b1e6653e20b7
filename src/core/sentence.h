// Sentences of errors, in parts. What another language calls otherwise (an argument, a constant, a function), and each
// number that belongs to an argument, is a part of its own, marked where the sentence is written; everything else is
// text. twLastErrorPart shows the parts to callers, and parcels carry them to peers.
//
// A name that is written as mere text reads the same in C, but stays C's name in every other language.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "tokenway/tokenway.h"

namespace tw {

// An argument, by its path as a C caller writes it, where "[]" takes one or two indices, or none for all of it:
// "config.lanes", {"input.payloads[]", 1}, {"ids[]", 3, 0}. The path must outlive the Argument.
struct Argument {
  constexpr Argument(const char* of, int64_t index = -1, int64_t second = -1) : path(of), indices{index, second} {}

  const char* path;
  int64_t indices[2];
};

// Integers that belong to the last argument before them: what it has, and the least and most that it may have.
struct Value {
  template <std::integral Integer>
  explicit Value(Integer number)
      : beyond(number > 0 && static_cast<uint64_t>(number) > uint64_t{INT64_MAX} ? static_cast<uint64_t>(number) : 0),
        value(beyond > 0 ? INT64_MAX : static_cast<int64_t>(number)) {}
  template <class Enum>
    requires std::is_enum_v<Enum>
  explicit Value(Enum number) : Value(static_cast<int>(number)) {}

  uint64_t beyond;  // the number, if it is more than `value` can hold
  int64_t value;
};
struct Least {
  int64_t value;
};
struct Most {
  int64_t value;
};

// A value of an enum; TW_CONSTANT(twFlat) is one, and reads "twFlat (2)".
struct Constant {
  const char* name;
  int value;
};
#define TW_CONSTANT(name) (::tw::Constant{#name, name})

// A function of the C API.
struct Function {
  const char* name;
};
// Likewise one whose call is under way, so that the call that failed may be made again when it has ended.
struct UnderWay {
  const char* name;
};

// A sentence, or a piece of one. Everything that a sentence is filled with becomes a Sentence by itself.
class Sentence {
 public:
  struct Part {  // as twErrorPart_t
    twPartKind_t kind = twPartText;
    std::string text;
    std::string name;
    int64_t indices[2] = {-1, -1};
    int64_t value = 0;
  };

  Sentence() = default;
  Sentence(const Sentence& other);
  Sentence(Sentence&& other) = default;
  Sentence& operator=(const Sentence& other);
  Sentence& operator=(Sentence&& other) = default;
  ~Sentence() = default;

  Sentence(std::string_view text);
  Sentence(const std::string& text) : Sentence(std::string_view(text)) {}
  Sentence(const char* text) : Sentence(std::string_view(text)) {}
  template <std::integral Integer>
  Sentence(Integer number) : Sentence(Number{static_cast<uint64_t>(number), std::is_signed_v<Integer>}) {}
  template <class Enum>
    requires std::is_enum_v<Enum>
  Sentence(Enum number) : Sentence(static_cast<int>(number)) {}
  Sentence(double number);
  Sentence(const void* pointer);
  Sentence(const Argument& argument);
  Sentence(const Value& value);
  Sentence(const Least& least);
  Sentence(const Most& most);
  Sentence(const Constant& constant);
  Sentence(const Function& function);
  Sentence(const UnderWay& call);

  // Goes on. A number of an argument that has none yet gets the last one before it.
  void append(const Sentence& more);
  void append(Part part);

  const std::vector<Part>& parts() const;
  std::string text() const;

 private:
  struct Number {
    uint64_t bits;
    bool is_signed;
  };
  struct Free {
    void operator()(std::vector<Part>* parts) const;
  };
  explicit Sentence(Number number);

  // None of an empty sentence. Apart, so that a Status that is ok is destroyed by one comparison, and the hundreds of
  // places that can fail hold little code: with the parts inside, all of the library took a sixth longer to compile.
  std::unique_ptr<std::vector<Part>, Free> parts_;
};

// A format whose "{}" are as many as the values that fill them: another one does not compile. (std::format is not in
// every libstdc++ that we build with, and knows no parts.)
template <class... Values>
struct Format {
  template <size_t N>
  consteval Format(const char (&format)[N]) : text(format, N - 1) {
    size_t places = 0;
    for (size_t i = 0; i + 1 < text.size(); ++i) places += text[i] == '{' && text[i + 1] == '}';
    if (places != sizeof...(Values)) throw "a format has another number of {} than there are values";
  }

  std::string_view text;
};

// Fills a format that the compiler has checked.
Sentence fill(std::string_view format, std::initializer_list<Sentence> values);

template <class... Values>
Sentence compose(Format<std::type_identity_t<Values>...> format, const Values&... values) {
  return fill(format.text, {Sentence(values)...});
}

}  // namespace tw
