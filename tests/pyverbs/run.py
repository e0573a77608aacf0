#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs one module of rdma-core's tests: run.py FOLDER MODULE [OPTION...]

FOLDER contains the unpacked package `tests` of the distribution. OPTION is an option of the tests' own runner (--dev, --gid,
--port). Prints one line for each test: `ok ID`, `skip ID reason` or `fail ID`, the last followed by the indented traceback.
"""
import importlib
import sys
import unittest

folder, module = sys.argv[1:3]
sys.argv[1:] = sys.argv[3:]
sys.path[:0] = [folder, folder + '/tests']
args_parser = importlib.import_module('args_parser')
args_parser.parser.parse_args()


class Lines(unittest.TestResult):
    """Prints the result of each test as soon as the test has ended."""

    def say(self, word, test, rest=''):
        print(word, test.id(), rest, flush=True)

    def addSuccess(self, test):
        self.say('ok', test)

    def addSkip(self, test, reason):
        self.say('skip', test, ' '.join(reason.split()))

    def addError(self, test, err):
        super().addError(test, err)
        self.broken(test, self.errors)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.broken(test, self.failures)

    def broken(self, test, collected):
        self.say('fail', test)
        for line in collected[-1][1].splitlines():
            print('    ' + line, flush=True)


# The package object is created here, because the __init__ of the package would load every module.
package = type(sys)('tests')
package.__path__ = [folder + '/tests']
sys.modules['tests'] = package
loaded = importlib.import_module('tests.' + module)
unittest.defaultTestLoader.loadTestsFromModule(loaded).run(Lines())
