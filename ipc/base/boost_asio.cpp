// Compiles Boost.Asio's functions once: the rest of the tree only has their declarations.
#include <boost/asio/impl/src.hpp>
