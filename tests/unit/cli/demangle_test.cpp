#include "clients/cli/text/demangle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "clients/cli/text/limits.h"

namespace bulkhead::cli {
namespace {

using testing::EndsWith;
using testing::StartsWith;

TEST(Demangling, TellsWhatAFramesSymbolStandsFor) {
    EXPECT_EQ(demangled_frame("_ZN4evil3runEPKfi+0x1f (evil.so)"), "evil::run(float const*, int)+0x1f (evil.so)");
    EXPECT_EQ(demangled_frame("_ZN4evil3runEv (evil.so)"), "evil::run() (evil.so)");
}

TEST(Demangling, LeavesAloneWhatIsNoMangledSymbol) {
    for (const char* frame : {"abort+0xd3 (libc.so.6)", "+0x1234 (program)", "", "_Z", "_Zwhatever+0x1 (x.so)"})
        EXPECT_EQ(demangled_frame(frame), frame);
}

TEST(Demangling, LongSymbolsAreDemangledBeforeTheyAreCut) {
    std::string symbol = "_ZN";
    for (int i = 0; i < 20; ++i) symbol += "9namespace";
    symbol += "3runEv";
    ASSERT_GT(symbol.size(), 200U);
    const std::string frame = demangled_frame(symbol + "+0x1f (libtorch_cpu.so)");
    EXPECT_THAT(frame, StartsWith("namespace::namespace::"));
    EXPECT_THAT(frame, EndsWith("::run()+0x1f (libtorch_cpu.so)"));
}

/// f(t<t<…>, t<…>>): each level has the one before it twice.
std::string hostile_symbol(int levels) {
    std::string symbol = "_Z1f1tI1xS0_E";  // S_ is t, S0_ is x, S1_ is t<x, x>
    for (int level = 0; level < levels; ++level) {
        const std::string last = std::string{"S"} + "123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"[level] + "_";
        symbol += "S_I" + last + last + "E";
    }
    return symbol;
}

TEST(Demangling, WhatASymbolStandsForIsBounded) {
    const std::string cut = demangled_frame(hostile_symbol(10) + "+0x1 (x.so)");
    EXPECT_THAT(cut, StartsWith("f(t<x, x>, t<t<x, x>, t<x, x> >"));
    EXPECT_EQ(cut.size(), limits::demangled_bytes_max + std::string{"+0x1 (x.so)"}.size());

    const std::string frame = hostile_symbol(34) + "+0x1 (x.so)";  // gigabytes
    EXPECT_EQ(demangled_frame(frame), frame);
}

}  // namespace
}  // namespace bulkhead::cli
