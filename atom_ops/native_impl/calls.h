// How Python calls kernels: by a table of them, with the arguments of a call in words of 8 bytes, so that
// calls can be kept and made again, many at a time.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

typedef uint64_t Word;  // a pointer, an integer, or a float in its first bytes

// As struct.pack of Python has them.
template <typename A> constexpr char letter() {
    return std::is_pointer<A>::value ? 'P' : std::is_same<A, float>::value ? 'f' : 'q';
}

template <typename A> inline A argument(const Word& word) {
    static_assert(sizeof(A) == sizeof(Word) || std::is_same<A, float>::value, "no such letter");
    A value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

template <auto FUNCTION> struct Packed;

template <typename... A, void (*FUNCTION)(A...)> struct Packed<FUNCTION> {
    static constexpr char LETTERS[] = {letter<A>()..., '\0'};

    static void run(const Word* words) { spread(words, std::index_sequence_for<A...>{}); }

  private:
    template <size_t... I> static void spread(const Word* words, std::index_sequence<I...>) {
        FUNCTION(argument<A>(words[I])...);
    }
};

struct Kernel {
    const char *name, *letters;
    void (*run)(const Word* words);
};

struct Call {
    void (*run)(const Word* words);
    const Word* words;
};
