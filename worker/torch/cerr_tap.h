#pragma once

#include <mutex>
#include <streambuf>
#include <string>

namespace bulkhead::worker {

/// Copies what is written to std::cerr, and passes it on. A compiled AOTInductor model that throws
/// prints its message there, and returns only a number.
///
/// Thread  `clear` and `text` on any; writers to std::cerr are serialised
class CerrTap final : public std::streambuf {
public:
    /// The process' only tap. The first call installs it; it is never removed: std::cerr may be
    /// used while the process ends.
    static CerrTap& instance();

    void clear();
    /// The last 16 KiB written since `clear`.
    [[nodiscard]] std::string text() const;

private:
    CerrTap();
    std::streamsize xsputn(const char* text, std::streamsize count) override;
    int_type overflow(int_type character) override;
    int sync() override;

    mutable std::mutex mutex_;
    std::string heard_;
    std::streambuf* const target_;  ///< last: with it std::cerr begins to write here
};

}  // namespace bulkhead::worker
