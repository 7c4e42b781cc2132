"""What several recipes share: options, training, reports, models, data and measurements."""
